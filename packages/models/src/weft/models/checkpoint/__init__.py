"""Models on disk."""

from .huggingface import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
