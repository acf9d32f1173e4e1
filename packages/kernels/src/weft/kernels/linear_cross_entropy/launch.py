"""Launches `scale`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..aot import Variant
from . import kernel

BLOCK, WARPS = 4096, 8  # 16 elements a thread: two 16-byte accesses of bf16
PROGRAMS = 1056  # 8 for each of the 132 multiprocessors of an H100 or H200; few, since most calls do nothing


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x, contiguous, times a factor of one element, in place."""
    N = x.numel()
    if N:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            kernel.scale[(min(PROGRAMS, -(-N // BLOCK)),)](x, factor.to(torch.float32), N, BLOCK=BLOCK, num_warps=WARPS)
    return x


VARIANTS = tuple(
    Variant(
        f"linear_cross_entropy.scale/{dtype}",
        kernel.scale,
        {"x_ptr": f"*{dtype}:16", "factor_ptr": "*fp32:16", "N": "i64:16"},
        {"BLOCK": BLOCK},
        WARPS,
    )
    for dtype in ("bf16", "fp32")
)
