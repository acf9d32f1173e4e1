"""`grouped_matmul`: each group of rows times a matrix of the group, as the experts of a mixture are computed."""

from .sharded import grouped_matmul

__all__ = ["grouped_matmul"]
