"""Attention on plain tensors and DTensors, and the key-value cache."""

from .cache import KeyValueCache
from .op import attention, document_bounds

__all__ = ["KeyValueCache", "attention", "document_bounds"]
