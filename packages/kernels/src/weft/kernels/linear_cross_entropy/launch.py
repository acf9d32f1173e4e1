"""Launches the kernels `scale` and `accumulate`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from . import kernel

BLOCK, WARPS = 4096, 8  # 16 elements a thread: 16-byte accesses to bf16 and to bytes
PROGRAMS = 1056  # 8 for each of the 132 multiprocessors of an H100 or H200; few, since most calls do nothing


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write x * factor to `out`, multiplied in float32. factor: one element. out: may be x. Both are contiguous."""
    N = x.numel()
    if N:
        with device_of(x):
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


def accumulate(product: Tensor, high: Tensor, low: Tensor, first: bool, last: bool) -> None:
    """See `gradients.accumulate`."""
    N = product.numel()
    if N:
        with device_of(product):
            kernel.accumulate[(-(-N // BLOCK),)](
                product, high.view(torch.int16), low, N, FIRST=first, LAST=last, BLOCK=BLOCK, num_warps=WARPS
            )


VARIANTS = (
    *(
        Variant(
            f"linear_cross_entropy.scale/{dtype}-to-{to}",
            kernel.scale,
            {"x_ptr": f"*{dtype}:16", "factor_ptr": "*fp32", "out_ptr": f"*{to}:16", "N": "i64:16"},
            {"IN_PLACE": int(dtype == to), "BLOCK": BLOCK},
            WARPS,
        )
        for dtype, to in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32"))
    ),
    *(
        Variant(
            f"linear_cross_entropy.accumulate/{name}",
            kernel.accumulate,
            {"product_ptr": "*fp32:16", "high_ptr": "*i16:16", "low_ptr": "*u8:16", "N": "i32:16"},
            {"FIRST": int(name == "first"), "LAST": int(name == "last"), "BLOCK": BLOCK},
            WARPS,
        )
        for name in ("first", "between", "last")
    ),
)
