"""qkv_linear: the query, key and value projections of attention, and their rope, in one op."""

from .sharded import qkv_linear

__all__ = ["qkv_linear"]
