"""Matrix products with fused epilogues: `matmul`, `linear`, and two products which overlap communication."""

from .sharded import all_gather_matmul, linear, matmul, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "linear", "matmul", "matmul_reduce_scatter"]
