"""Random numbers by counter: the same on every mesh, on every device, in every order."""

from .sharded import normal, normal_, uniform

__all__ = ["normal", "normal_", "uniform"]
