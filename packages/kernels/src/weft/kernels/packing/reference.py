"""pack and unpack of local tensors, in plain torch. They are inverses, and each is the backward of the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch.op import Tensors


def pack(*tensors: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, Tensors]:
    """Tensors [..., P * width] -> packed [..., P, sum of widths]: part p holds part p of every tensor, side by side."""
    parts = [x.reshape(*x.shape[:-1], x.shape[-1] // width, width) for x, width in zip(tensors, widths, strict=True)]
    return torch.cat(parts, -1), ()


def unpack(packed: Tensor, *, widths: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensors]:
    """packed [..., P, sum of widths] -> tensors [..., P * width], in the order of `widths`."""
    return tuple([part.flatten(-2) for part in torch.split(packed, list(widths), -1)]), ()


def pack_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, widths: tuple[int, ...]) -> Tensors:
    """The gradients of the tensors: `unpack` of the packed tensor's gradient."""
    parts, _ = unpack(grad, widths=widths)
    return tuple([part if need else None for part, need in zip(parts, needed, strict=True)])


def unpack_backward(
    saved: Tensors, grads: tuple[Tensor | None, ...], needed: Sequence[bool], *, widths: tuple[int, ...]
) -> Tensors:
    """The gradient of the packed tensor: `pack` of the gradients of the tensors. None among them means zeros."""
    given = next(i for i, grad in enumerate(grads) if grad is not None)
    like = grads[given]
    assert like is not None, "autograd calls backward with at least one gradient"
    count = like.shape[-1] // widths[given]
    full = [
        like.new_zeros(*like.shape[:-1], count * width) if grad is None else grad
        for grad, width in zip(grads, widths, strict=True)
    ]
    return (pack(*full, widths=widths)[0],) if needed[0] else (None,)
