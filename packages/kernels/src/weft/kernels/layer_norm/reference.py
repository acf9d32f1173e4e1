"""layer_norm: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, eq. 4), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..op import Tensors


def forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H], bias [H] -> [..., H]; computed in float32 at least, then rounded to x's dtype, as torch does."""
    wide = _wide(x)
    scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    output, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], scale, shift, eps)  # mean, rstd [..., 1]
    return output.to(x.dtype), (x, weight, bias, mean, rstd)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """With n = (x - mean) * rstd: dx is aten's, in one pass; dweight = sum(grad * n), dbias = sum(grad).

    The sums are torch's own, which add in pairs: aten's backward adds one row after the other, in float32.
    """
    x, weight, bias, mean, rstd = saved
    assert x is not None and mean is not None and rstd is not None, "forward saves them"
    wide, upstream = _wide(x), grad.to(mean.dtype)
    dx = dweight = dbias = None
    if needed[0]:
        scale = None if weight is None else weight.to(wide.dtype)
        dx = torch.ops.aten.native_layer_norm_backward(
            upstream, wide, x.shape[-1:], mean, rstd, scale, None, [True, False, False]
        )[0].to(x.dtype)
    if weight is not None and needed[1]:
        normal = (wide - mean).mul_(rstd)
        dweight = _rows(normal.mul_(upstream)).sum(0).to(weight.dtype)
    if bias is not None and needed[2]:
        dbias = _rows(upstream).sum(0).to(bias.dtype)
    return (dx, dweight, dbias)[: len(needed)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # the count is spelled out: -1 is ambiguous where x is empty
