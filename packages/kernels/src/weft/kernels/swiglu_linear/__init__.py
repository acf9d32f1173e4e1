"""swiglu_linear: the gated half of a feed-forward layer in one op, its local computation and its layout rule."""

from .sharded import swiglu_linear

__all__ = ["swiglu_linear"]
