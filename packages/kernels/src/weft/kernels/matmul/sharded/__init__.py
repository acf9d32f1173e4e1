"""Products on plain tensors and DTensors."""

from .linear import linear
from .product import matmul

__all__ = ["linear", "matmul"]
