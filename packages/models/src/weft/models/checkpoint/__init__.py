"""Models on disk."""

from .adapters import load_lora, save_lora
from .huggingface import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "load_lora", "save_lora", "save_pretrained"]
