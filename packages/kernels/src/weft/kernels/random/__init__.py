"""Counter-based random numbers: the same on every mesh, on every device, in any order of drawing."""

from .sharded import normal, normal_, uniform

__all__ = ["normal", "normal_", "uniform"]
