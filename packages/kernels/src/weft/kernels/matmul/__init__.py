"""matmul and linear: products with what follows them, their local computation and their layout rules."""

from .sharded import all_gather_matmul, linear, matmul, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "linear", "matmul", "matmul_reduce_scatter"]
