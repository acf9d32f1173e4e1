"""grouped_matmul: products of groups of rows, each with a matrix of its own; its local computation and its layout rule."""

from .sharded import grouped_matmul

__all__ = ["grouped_matmul"]
