"""Layer norm: `layer_norm`, and `add_layer_norm` with a residual added first."""

from .sharded import add_layer_norm, layer_norm

__all__ = ["add_layer_norm", "layer_norm"]
