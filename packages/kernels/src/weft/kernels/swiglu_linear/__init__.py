"""swiglu_linear: both input projections of a SwiGLU feed-forward layer and their gate, in one op."""

from .sharded import swiglu_linear

__all__ = ["swiglu_linear"]
