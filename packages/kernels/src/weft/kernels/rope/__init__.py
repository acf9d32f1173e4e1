"""rope: the op, its local computation and its layout rule."""

from .sharded import rope

__all__ = ["rope"]
