"""layer_norm: the op, its local computation and its layout rule; alone, and of a sum with a residual."""

from .sharded import add_layer_norm, layer_norm

__all__ = ["add_layer_norm", "layer_norm"]
