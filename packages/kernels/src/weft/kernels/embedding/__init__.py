"""Embedding: the op, its local computation and its layout rule."""

from .sharded import embedding

__all__ = ["embedding"]
