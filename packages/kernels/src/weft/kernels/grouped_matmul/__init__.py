"""grouped_matmul: each group of rows times its own matrix, as the experts of a mixture are computed."""

from .sharded import grouped_matmul

__all__ = ["grouped_matmul"]
