"""Several projections of one input in one op: of attention, with rope, and of a feed-forward layer, with the gate."""

from .sharded import qkv_linear, swiglu_linear

__all__ = ["qkv_linear", "swiglu_linear"]
