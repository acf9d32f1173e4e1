"""Attention: the op and its key-value cache."""

from .sharded import KeyValueCache, attention

__all__ = ["KeyValueCache", "attention"]
