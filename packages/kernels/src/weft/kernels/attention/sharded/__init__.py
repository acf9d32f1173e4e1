"""attention on plain tensors and DTensors, and the cache of keys and values that it reads on from."""

from .cache import KeyValueCache
from .op import attention

__all__ = ["KeyValueCache", "attention"]
