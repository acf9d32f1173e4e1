"""add of local tensors: x + alpha * y, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch.op import Tensors


def forward(x: Tensor, y: Tensor, *, repeated: int = 0, alpha: float = 1) -> tuple[Tensor, Tensors]:
    """x + alpha * y, of the shape of x. y lacks the first `repeated` dims of x; no other dim is broadcast.

    Raises ValueError for any other shapes.
    """
    if x.shape[repeated:] != y.shape:
        raise ValueError(
            f"add takes two tensors of one shape but for {repeated} first dims, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; expand one"
        )
    return x + y if alpha == 1 else torch.add(x, y, alpha=alpha), ()


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, repeated: int = 0, alpha: float = 1) -> Tensors:
    """dx = grad; dy = alpha * grad, summed over the first `repeated` dims."""
    dy = None if not needed[1] else grad if alpha == 1 else grad * alpha
    if dy is not None and repeated:
        dy = dy.sum(tuple(range(repeated)))
    return grad if needed[0] else None, dy
