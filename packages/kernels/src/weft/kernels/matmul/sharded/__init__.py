"""Products on plain tensors and DTensors."""

from .overlapped import all_gather_matmul, matmul_reduce_scatter
from .product import linear, matmul

__all__ = ["all_gather_matmul", "linear", "matmul", "matmul_reduce_scatter"]
