"""GELU: the op, its local computation and its layout rule."""

from .sharded import gelu

__all__ = ["gelu"]
