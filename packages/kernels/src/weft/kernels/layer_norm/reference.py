"""Layer norm in plain torch: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling
from ..dispatch.op import Tensors

Wanted = tuple[bool, ...]
# Up to ROWS_OF_TORCH rows, the running sums in torch's layer_norm backward err by at most 2e-6. More rows are
# computed in pieces: of at most ROWS_AT_ONCE rows, for sums nearly as exact as torch.sum's pairwise ones, and of at
# most ELEMENTS_AT_ONCE elements, to stay in a core's cache.
ROWS_OF_TORCH, ROWS_AT_ONCE, ELEMENTS_AT_ONCE = 2048, 512, 2**18


def forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H], bias [H] -> [..., H]; in float32 at least, then rounded to x's dtype, as torch does."""
    wide = _wide(x)
    scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    output, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], scale, shift, eps)  # mean, rstd [..., 1]
    return output.to(x.dtype), (x, weight, bias, mean, rstd)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """dx, dweight = sum(grad * n) and dbias = sum(grad), where n = (x - mean) * rstd; dx in one pass, by aten."""
    x, weight, bias, mean, rstd = saved
    assert x is not None and mean is not None and rstd is not None, "forward saves x, mean and rstd"
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
    """The wanted gradients of x, weight and bias by aten, which sums over rows with a running sum."""
    found = torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, bias, wanted)
    return [each if want else None for each, want in zip(found, wanted, strict=True)]


def _in_pieces(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Wanted
) -> list[Tensor | None]:
    """`_gradients` for many rows: by pieces, then summed, as a single running sum would lose the last digits."""
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
    """[dweight, dbias] for a compiler, which fuses both into one pass; the number of rows may be symbolic."""
    return [((x - mean) * rstd * grad).sum(0), grad.sum(0)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1, which is ambiguous for an empty x
