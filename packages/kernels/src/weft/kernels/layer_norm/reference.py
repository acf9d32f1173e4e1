"""layer_norm: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, eq. 4), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import is_compiling
from ..op import Tensors

Wanted = tuple[bool, ...]
# A running sum of so many rows, which torch's own layer_norm takes, is within 2e-6. Of more it takes pieces: of so many rows that
# their sums are nearly as exact as torch's sum, which adds in pairs, and of so many elements that they stay in a core's cache.
ROWS_OF_TORCH, ROWS_AT_ONCE, ELEMENTS_AT_ONCE = 2048, 512, 2**18


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
    operands, wanted = (upstream, wide, mean, rstd), (needed[0], *sums)
    if not any(sums) or (not is_compiling() and x.numel() <= ROWS_OF_TORCH * x.shape[-1]):
        dx, *totals = _gradients(*operands, scale, shift, wanted)
    elif is_compiling():
        dx = _gradients(*operands, scale, shift, (needed[0], False, False))[0]
        totals = _fused_sums(*map(_rows, operands))
    else:
        dx, *totals = _in_pieces(*operands, scale, shift, wanted)
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


def _in_pieces(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Wanted
) -> list[Tensor | None]:
    """As `_gradients`, where rows are so many that the last digits of a running sum are lost: so many at once, then their sums."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    rows = max(1, min(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // x.shape[-1]))
    parts: list[list[Tensor | None]] = []
    for start in range(0, math.prod(x.shape[:-1]), rows):
        g, part, m, r = (_rows(each)[start : start + rows] for each in (grad, x, mean, rstd))
        found, *sums = _gradients(g, part, m, r, weight, bias, wanted)
        if dx is not None and found is not None:
            _rows(dx)[start : start + rows] = found
        parts.append(sums)
    totals = zip(zip(*parts, strict=True), wanted[1:], strict=True)
    return [dx, *(torch.stack(each).sum(0) if want else None for each, want in totals)]


def _fused_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor | None]:
    """As `_sums`, for a compiler: it makes one pass of these, and the number of rows may be a symbol."""
    return [((x - mean) * rstd * grad).sum(0), grad.sum(0)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # the count is spelled out: -1 is ambiguous where x is empty
