"""linear: the op, its local computation and its layout rule."""

from .sharded import linear

__all__ = ["linear"]
