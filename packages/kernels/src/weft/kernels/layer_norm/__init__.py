"""layer_norm: the op, its local computation and its layout rule."""

from .sharded import layer_norm

__all__ = ["layer_norm"]
