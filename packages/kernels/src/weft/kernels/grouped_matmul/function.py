"""grouped_matmul of local tensors, forward and backward. Ops of torch, for where groups end is not known while tracing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import use_triton
from ..launched import launched
from ..op import Tensors
from . import reference


def forward(a: Tensor, b: Tensor, offsets: Tensor, *, first: int = 0) -> tuple[Tensor, Tensors]:
    """See `reference.forward`; backward needs the operands."""
    return _product(a, b, offsets, first), (a, b, offsets)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, first: int = 0) -> Tensors:
    """da = grad @ b.T by groups; db = a.T @ grad of the rows of each group."""
    a, b, offsets = saved
    assert a is not None and b is not None and offsets is not None, "forward saves them"
    da = _product(grad, b.mT, offsets, first) if needed[0] else None
    db = _weights(a, grad, offsets, first, len(b)) if needed[1] else None
    return da, db, None


def _product(a: Tensor, b: Tensor, offsets: Tensor, first: int) -> Tensor:
    out = torch.zeros((a.shape[0], b.shape[-1]), dtype=a.dtype, device=a.device)
    _by_rows(a, b, offsets, out, first)
    return out


def _weights(a: Tensor, grad: Tensor, offsets: Tensor, first: int, count: int) -> Tensor:
    out = torch.empty((count, a.shape[-1], grad.shape[-1]), dtype=a.dtype, device=a.device)
    _by_groups(a, grad, offsets, out, first)
    return out


@launched("grouped_matmul(Tensor a, Tensor b, Tensor offsets, Tensor(a!) out, int first)")
def _by_rows(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, first: int) -> None:
    if use_triton(a):
        from . import launch  # imports triton, which a CPU run may not have

        launch.forward(a, b, offsets, out, first)
    else:
        reference.forward(a, b, offsets, out, first)


@launched("grouped_matmul_weights(Tensor a, Tensor grad, Tensor offsets, Tensor(a!) out, int first)")
def _by_groups(a: Tensor, grad: Tensor, offsets: Tensor, out: Tensor, first: int) -> None:
    if use_triton(a):
        from . import launch

        launch.weights(a, grad, offsets, out, first)
    else:
        reference.weights(a, grad, offsets, out, first)
