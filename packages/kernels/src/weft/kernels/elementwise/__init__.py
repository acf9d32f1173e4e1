"""add: the op, its local computation and its layout rule."""

from .sharded import add

__all__ = ["add"]
