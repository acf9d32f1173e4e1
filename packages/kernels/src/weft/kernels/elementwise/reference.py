"""add: the sum of two tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..op import Tensors


def forward(x: Tensor, y: Tensor, *, repeated: int = 0) -> tuple[Tensor, Tensors]:
    """x, and y of the shape of x without its first `repeated` dims -> the shape of x; no other dim is broadcast.

    Raises ValueError for shapes that do not fit so.
    """
    if x.shape[repeated:] != y.shape:
        raise ValueError(
            f"add takes two tensors of one shape but for {repeated} first dims, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; expand one"
        )
    return x + y, ()


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, repeated: int = 0) -> Tensors:
    """Both gradients are the incoming one, for y summed over the dims that it lacks."""
    dy = grad if needed[1] else None
    if dy is not None and repeated:
        dy = dy.sum(tuple(range(repeated)))
    return grad if needed[0] else None, dy
