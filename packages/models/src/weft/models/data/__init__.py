"""Text to tokens, on disk and in batches: tokenizers, prepared folders, the order of samples. It knows no mesh and no rank."""
