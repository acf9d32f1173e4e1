"""grouped_matmul of local tensors, forward and backward. Custom ops of torch, for where the groups end is not known while tracing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from ..backend import use_triton
from ..op import Tensors


def forward(a: Tensor, b: Tensor, offsets: Tensor, *, first: int = 0) -> tuple[Tensor, Tensors]:
    """See `reference.forward`; backward needs the operands."""
    out: Tensor = _product(a, b, offsets, first)
    return out, (a, b, offsets)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, first: int = 0) -> Tensors:
    """da = grad @ b.T by groups; db = a.T @ grad of the rows of each group."""
    a, b, offsets = saved
    assert a is not None and b is not None and offsets is not None, "forward saves them"
    da = _product(grad, b.mT, offsets, first) if needed[0] else None
    db = _weights(a, grad, offsets, first, len(b)) if needed[1] else None
    return da, db, None


@library.custom_op("weft::grouped_matmul", mutates_args=())
def _product(a: Tensor, b: Tensor, offsets: Tensor, first: int) -> Tensor:
    if use_triton(a):
        from . import launch  # imports triton, which a CPU run may not have

        return launch.forward(a, b, offsets, first)
    from . import reference

    return reference.forward(a, b, offsets, first)


@_product.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor, first: int) -> Tensor:
    return torch.empty((a.shape[0], b.shape[-1]), dtype=a.dtype, device=a.device)


@library.custom_op("weft::grouped_matmul_weights", mutates_args=())
def _weights(a: Tensor, grad: Tensor, offsets: Tensor, first: int, count: int) -> Tensor:
    if use_triton(a):
        from . import launch

        return launch.weights(a, grad, offsets, first, count)
    from . import reference

    return reference.weights(a, grad, offsets, first, count)


@_weights.register_fake
def _(a: Tensor, grad: Tensor, offsets: Tensor, first: int, count: int) -> Tensor:
    return torch.empty((count, a.shape[-1], grad.shape[-1]), dtype=a.dtype, device=a.device)
