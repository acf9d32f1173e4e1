"""swiglu: the op, its local computation and its layout rule."""

from .sharded import swiglu

__all__ = ["swiglu"]
