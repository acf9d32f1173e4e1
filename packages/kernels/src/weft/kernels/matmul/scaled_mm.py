"""Products of 8-bit factors by `torch._scaled_mm`, torch's own GEMM, on chips with 8-bit tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.backend import chip_of, multiplies
from ..launching.launched import launched

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # bytes: `torch._scaled_mm` needs sizes, strides and addresses in multiples of this


def can_multiply(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` can multiply a [M, K] and b [K, N].

    Conditions: a and b are contiguous along K, and not both are in e5m2. With scales for each row or column, also: the
    output is bfloat16, and b is in e4m3.
    """
    if not (a.is_cuda and torch.version.hip is None and a.ndim == b.ndim == 2 and a.numel() and b.numel()):
        return False
    if not multiplies(chip_of(a.device)[0], E4M3) or (a.stride(1), b.stride(0)) != (1, 1):
        return False
    if any(size % ALIGNMENT for size in (*b.shape, a.stride(0), b.stride(1))):
        return False
    if not ({a.dtype, b.dtype} <= {E4M3, E5M2} and E4M3 in (a.dtype, b.dtype)):
        return False
    if _has_row_scales(a_scale, b_scale):
        return dtype == torch.bfloat16 and b.dtype == E4M3
    return dtype in (torch.bfloat16, torch.float16, torch.float32)


def product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(a * a_scale) @ (b * b_scale), for factors which `can_multiply` accepts; summed in float32 and rounded once."""
    out = torch.empty((len(a), b.shape[1]), dtype=dtype, device=a.device)
    _launch(a, b, a_scale, b_scale, out)
    return out


@launched("scaled_product(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor(a!) out)")
def _launch(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out: Tensor) -> None:
    """Writes the product into out. A custom op, because `_align` reads addresses, which a trace does not know."""
    unit = torch.ones((), device=a.device)
    scales = [unit if each is None else each for each in (a_scale, b_scale)]
    if _has_row_scales(a_scale, b_scale):
        shapes = (len(a), 1), (1, b.shape[1])
        scales = [
            (each if each.numel() == 1 else each.reshape(shape)).expand(shape).contiguous()
            for each, shape in zip(scales, shapes, strict=True)
        ]
    torch._scaled_mm(
        _align(a), _align(b.mT).mT,
        scale_a=scales[0], scale_b=scales[1], out_dtype=out.dtype, use_fast_accum=False, out=out,
    )  # fmt: skip


def _has_row_scales(*scales: Tensor | None) -> bool:
    return any(each is not None and each.numel() > 1 for each in scales)


def _align(x: Tensor) -> Tensor:
    """x, copied if the address of x is no multiple of ALIGNMENT."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)
