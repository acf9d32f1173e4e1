"""Products of factors of 8 bits by torch's own GEMM of such, `torch._scaled_mm`, on chips that have one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import chip_of, multiplies
from ..launched import launched

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = 16  # bytes: sizes, strides and addresses are multiples of it


def takes(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether torch multiplies a [M, K] and b [K, N] so: a by rows and b by columns, no two factors of e5m2.

    With a scale for each row or column it does to bfloat16 alone, and with b of e4m3.
    """
    if not (a.is_cuda and torch.version.hip is None and a.ndim == b.ndim == 2 and a.numel() and b.numel()):
        return False
    if not multiplies(chip_of(a.device)[0], E4M3) or (a.stride(1), b.stride(0)) != (1, 1):
        return False
    if any(size % STEP for size in (*b.shape, a.stride(0), b.stride(1))):
        return False
    if not ({a.dtype, b.dtype} <= {E4M3, E5M2} and E4M3 in (a.dtype, b.dtype)):
        return False
    if _by_rows(a_scale, b_scale):
        return dtype == torch.bfloat16 and b.dtype == E4M3
    return dtype in (torch.bfloat16, torch.float16, torch.float32)


def product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(a * a_scale) @ (b * b_scale), where torch `takes` them; sums are of float32, and rounded once."""
    out = torch.empty((len(a), b.shape[1]), dtype=dtype, device=a.device)
    _launch(a, b, a_scale, b_scale, out)
    return out


@launched("scaled_product(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor(a!) out)")
def _launch(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out: Tensor) -> None:
    """One op where it is traced: addresses are known as it runs."""
    one = torch.ones((), device=a.device)
    scales = [one if each is None else each for each in (a_scale, b_scale)]
    if _by_rows(a_scale, b_scale):
        shapes = (len(a), 1), (1, b.shape[1])
        scales = [
            (each if each.numel() == 1 else each.reshape(shape)).expand(shape).contiguous()
            for each, shape in zip(scales, shapes, strict=True)
        ]
    torch._scaled_mm(
        _at_a_step(a), _at_a_step(b.mT).mT,
        scale_a=scales[0], scale_b=scales[1], out_dtype=out.dtype, use_fast_accum=False, out=out,
    )  # fmt: skip


def _by_rows(*scales: Tensor | None) -> bool:
    return any(each is not None and each.numel() > 1 for each in scales)


def _at_a_step(x: Tensor) -> Tensor:
    return x if x.data_ptr() % STEP == 0 else x.clone(memory_format=torch.contiguous_format)
