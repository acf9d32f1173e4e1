"""add: the sum of two tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..op import Tensors


def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
    """x and y of one shape -> that shape; nothing is broadcast.

    Raises ValueError for two shapes.
    """
    if x.shape != y.shape:
        raise ValueError(f"add takes two tensors of one shape, got {tuple(x.shape)} and {tuple(y.shape)}; expand one")
    return x + y, ()


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool]) -> Tensors:
    """Both gradients are the incoming one."""
    return grad if needed[0] else None, grad if needed[1] else None
