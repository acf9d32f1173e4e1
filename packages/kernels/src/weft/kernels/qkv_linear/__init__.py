"""qkv_linear: an attention's three projections in one op, its local computation and its layout rule."""

from .sharded import qkv_linear

__all__ = ["qkv_linear"]
