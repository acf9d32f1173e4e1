"""Text to tokens, on disk and in batches: tokenizers, prepared folders, the order of samples.

Nothing here knows meshes or ranks.
"""
