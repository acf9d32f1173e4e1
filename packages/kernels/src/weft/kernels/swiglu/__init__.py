"""SwiGLU and GeGLU: the ops, their local computation and their layout rule."""

from .sharded import geglu, swiglu

__all__ = ["geglu", "swiglu"]
