"""Ops on plain tensors and on DTensors: `apply` runs an `Op`, `Sharding` is what its rule answers."""

from .run import Shapes, Sharding, apply, apply_many, first_order, independent

__all__ = ["Shapes", "Sharding", "apply", "apply_many", "first_order", "independent"]
