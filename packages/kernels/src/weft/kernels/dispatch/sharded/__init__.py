"""Runs ops on plain tensors and on DTensors: `apply` runs an `Op`; the op's rule returns a `Sharding`."""

from .autocast import autocasts, cast_for, sharing_casts
from .functions import apply, apply_many
from .rules import Shapes, Sharding, check_operands, infer_gradient_layouts, require_one_layout

__all__ = [
    "Shapes",
    "Sharding",
    "apply",
    "apply_many",
    "autocasts",
    "cast_for",
    "check_operands",
    "infer_gradient_layouts",
    "require_one_layout",
    "sharing_casts",
]
