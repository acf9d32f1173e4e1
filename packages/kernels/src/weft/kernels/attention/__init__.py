"""attention: the op, its cache, its local computation and its layout rules."""

from .sharded import KeyValueCache, attention

__all__ = ["KeyValueCache", "attention"]
