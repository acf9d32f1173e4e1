"""Dropout: the op, its local computation and its layout rule."""

from .sharded import dropout

__all__ = ["dropout"]
