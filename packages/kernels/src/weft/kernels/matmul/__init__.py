"""matmul and linear: products with what follows them, their local computation and their layout rules."""

from .sharded import linear, matmul

__all__ = ["linear", "matmul"]
