"""Models on disk: checkpoints and Hugging Face folders. Imports no submodule, as `checkpoint.manifest` needs no torch."""
