"""Launches `scale`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..aot import Variant
from . import kernel

BLOCK, WARPS = 4096, 8  # 16 elements a thread: two 16-byte accesses of bf16
PROGRAMS = 1056  # 8 for each of the 132 multiprocessors of an H100 or H200; few, since most calls do nothing


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """x times a factor of one element, multiplied in float32, in `out`, which may be x; both contiguous."""
    N = x.numel()
    if N:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            kernel.scale[(min(PROGRAMS, -(-N // BLOCK)),)](
                x,
                factor.to(torch.float32),
                out,
                N,
                IN_PLACE=x.data_ptr() == out.data_ptr(),
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return out


VARIANTS = tuple(
    Variant(
        f"linear_cross_entropy.scale/{dtype}-to-{to}",
        kernel.scale,
        {"x_ptr": f"*{dtype}:16", "factor_ptr": "*fp32", "out_ptr": f"*{to}:16", "N": "i64:16"},
        {"IN_PLACE": int(dtype == to), "BLOCK": BLOCK},
        WARPS,
    )
    for dtype, to in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32"))
)
