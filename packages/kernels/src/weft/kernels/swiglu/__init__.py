"""SwiGLU, GeGLU and GELU: the ops, their local computation and their layout rules."""

from .sharded import geglu, gelu, swiglu

__all__ = ["geglu", "gelu", "swiglu"]
