"""pack and unpack in plain torch: each the reverse of the other, and its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..op import Tensors


def pack(*tensors: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, Tensors]:
    """Each [..., P * width] -> [..., P, sum of the widths]: part p of all of them side by side."""
    parts = [x.reshape(*x.shape[:-1], x.shape[-1] // width, width) for x, width in zip(tensors, widths, strict=True)]
    return torch.cat(parts, -1), ()


def unpack(packed: Tensor, *, widths: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensors]:
    """[..., P, sum of the widths] -> each [..., P * width]."""
    return tuple([part.flatten(-2) for part in torch.split(packed, list(widths), -1)]), ()


def pack_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, widths: tuple[int, ...]) -> Tensors:
    """The gradient unpacked."""
    parts, _ = unpack(grad, widths=widths)
    return tuple([part if need else None for part, need in zip(parts, needed, strict=True)])


def unpack_backward(
    saved: Tensors, grads: tuple[Tensor | None, ...], needed: Sequence[bool], *, widths: tuple[int, ...]
) -> Tensors:
    """The gradients packed; one that is None is zero."""
    given = next(i for i, grad in enumerate(grads) if grad is not None)
    like = grads[given]
    assert like is not None, "backward comes here with a gradient"
    count = like.shape[-1] // widths[given]
    full = [
        like.new_zeros(*like.shape[:-1], count * width) if grad is None else grad
        for grad, width in zip(grads, widths, strict=True)
    ]
    return (pack(*full, widths=widths)[0],) if needed[0] else (None,)
