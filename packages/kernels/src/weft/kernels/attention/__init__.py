"""Attention: the op, a key-value cache, and the bounds of documents."""

from .sharded import KeyValueCache, attention, document_bounds

__all__ = ["KeyValueCache", "attention", "document_bounds"]
