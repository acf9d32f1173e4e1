"""Runs ops on plain tensors and on DTensors: `apply` runs an `Op`; the op's rule returns a `Sharding`."""

from .autocast import autocasts, cast_for
from .devices import check_devices
from .rules import Shapes, Sharding, independent, of_several
from .run import apply, apply_many

__all__ = [
    "Shapes",
    "Sharding",
    "apply",
    "apply_many",
    "autocasts",
    "cast_for",
    "check_devices",
    "independent",
    "of_several",
]
