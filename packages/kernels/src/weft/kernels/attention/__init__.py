"""Attention: the op, its key-value cache, and the bounds of documents."""

from .ranges import document_bounds
from .sharded import KeyValueCache, attention

__all__ = ["KeyValueCache", "attention", "document_bounds"]
