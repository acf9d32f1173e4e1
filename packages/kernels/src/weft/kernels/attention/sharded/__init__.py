"""Attention on plain tensors and DTensors, and its key-value cache."""

from .bounds import document_bounds
from .cache import KeyValueCache
from .op import attention

__all__ = ["KeyValueCache", "attention", "document_bounds"]
