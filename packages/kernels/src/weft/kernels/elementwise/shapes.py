"""What elementwise ops ask of their operands."""

from __future__ import annotations

from torch import Tensor


def check_same_shape(name: str, x: Tensor, y: Tensor) -> None:
    """Raises ValueError for operands of two shapes: these ops do not broadcast."""
    if x.shape != y.shape:
        raise ValueError(f"{name} takes two tensors of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
