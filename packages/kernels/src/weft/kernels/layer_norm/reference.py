"""layer_norm: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, eq. 4), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..op import Tensors

Wanted = tuple[bool, ...]
ROWS_AT_ONCE = 512  # a running sum of so many is as exact as torch's sum, which adds in pairs, is of any number


def forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H], bias [H] -> [..., H]; computed in float32 at least, then rounded to x's dtype, as torch does."""
    wide = _wide(x)
    scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    output, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], scale, shift, eps)  # mean, rstd [..., 1]
    return output.to(x.dtype), (x, weight, bias, mean, rstd)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """With n = (x - mean) * rstd: dx is aten's, in one pass; dweight = sum(grad * n), dbias = sum(grad)."""
    x, weight, bias, mean, rstd = saved
    assert x is not None and mean is not None and rstd is not None, "forward saves them"
    sums = tuple(each is not None and need for each, need in zip((weight, bias), needed[1:], strict=False))
    wide, upstream = _wide(x), grad.to(mean.dtype)
    scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    few = not torch.compiler.is_compiling() and math.prod(x.shape[:-1]) <= ROWS_AT_ONCE
    dx, *totals = _gradients(upstream, wide, mean, rstd, scale, shift, (needed[0], *(few and each for each in sums)))
    if not few and any(sums):
        rows = _rows(upstream), _rows(wide), _rows(mean), _rows(rstd)
        totals = _fused_sums(*rows) if torch.compiler.is_compiling() else _sums(*rows, scale, shift, sums)
    return None if dx is None else dx.to(x.dtype), *(
        total.to(each.dtype) if total is not None and each is not None and need else None
        for total, each, need in zip(totals, (weight, bias), sums, strict=False)
    )


def _gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Wanted
) -> list[Tensor | None]:
    """Those that are wanted, of x, weight and bias, by aten, which adds up one row after the other."""
    found = torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, bias, wanted)
    return [each if want else None for each, want in zip(found, wanted, strict=True)]


def _sums(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Wanted
) -> list[Tensor | None]:
    """The gradients of weight and bias, where rows are so many that the last digits of a running sum are lost."""
    pieces = zip(*(torch.split(each, ROWS_AT_ONCE) for each in (grad, x, mean, rstd)), strict=True)
    parts = [_gradients(g, part, m, r, weight, bias, (False, *wanted))[1:] for g, part, m, r in pieces]
    return [
        torch.stack(each).sum(0) if want else None for each, want in zip(zip(*parts, strict=True), wanted, strict=True)
    ]


def _fused_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor | None]:
    """As `_sums`, for a compiler: it makes one pass of these, and the number of rows may be a symbol."""
    return [((x - mean) * rstd * grad).sum(0), grad.sum(0)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # the count is spelled out: -1 is ambiguous where x is empty
