"""Launches the dropout kernel on a tensor of any strides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from ..random.launch import (
    OUTER_DIMS,
    PART_ARGUMENTS,
    STRIDE_ARGUMENTS,
    FillLaunch,
    fitted,
    grid,
    is_shifted,
    padded,
    signed,
)
from ..random.philox import Part, merge
from . import kernel

# 16 elements a thread: two 16-byte loads of bf16, and two stores. The kernel compiles without spills for sm_80 to
# sm_100 and gfx942; its speed is not measured yet.
LONG_RUN = FillLaunch(rows=1, groups=256, warps=4, lanes=8)


def masked(x: Tensor, residual: Tensor | None, part: Part, key: int, *, threshold: int, scale: float) -> Tensor:
    """Dropout of x plus the residual, as in `function.plain_masked`. x: bf16, fp16 or fp32. threshold: below 2**16."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x, None if residual is None else residual.contiguous(), y, part, signed(key), threshold, scale)
    return y


def _launch(x: Tensor, residual: Tensor | None, y: Tensor, part: Part, key: int, threshold: int, scale: float) -> None:
    sizes, strides, x_strides = merge(part.sizes, part.strides, x.stride())
    if len(sizes) > OUTER_DIMS + 1:  # rare: five dims, no two of which can be merged
        for i in range(len(x)):
            _launch(x[i], None if residual is None else residual[i], y[i], part.at(i), key, threshold, scale)
        return
    runs = Part(part.offset, sizes, strides)
    *outer, length = sizes
    rows, shifted = math.prod(outer), is_shifted(runs, LONG_RUN.lanes)
    _, R1, R2 = padded(tuple(outer), 1)
    launch = fitted(LONG_RUN, length, shifted)
    with device_of(x):
        kernel.masked[grid(launch, rows, length, shifted)](
            x, residual, y,
            rows, R1, R2, length, *padded(x_strides[:-1], 0), x_strides[-1], part.offset, *padded(strides[:-1], 0),
            key, threshold, scale,
            SHIFTED=shifted, ROWS=launch.rows, GROUPS=launch.groups, num_warps=launch.warps,
        )  # fmt: skip


def _variant(
    dtype: str, stride_xn: str, *, shifted: bool = False, narrow: bool = False, residual: bool = False
) -> Variant:
    """The kernel for 16-byte aligned tensors with long runs, or (narrow) with runs of one element, as a column has.

    stride_xn: "1" where the elements of a run are contiguous in memory.
    """
    memory = "contiguous" if stride_xn == "1" else "strided"
    launch = fitted(LONG_RUN, 1, shifted) if narrow else LONG_RUN
    x_strides = {"stride_x0": "i32:16", "stride_x1": "i32:16", "stride_x2": "i32:16", "stride_xn": stride_xn}
    return Variant(
        f"dropout.masked/{dtype}-{'column' if narrow else 'shifted' if shifted else memory}"
        f"{'-residual' if residual else ''}",
        kernel.masked,
        {
            "x_ptr": f"*{dtype}:16",
            "residual_ptr": f"*{dtype}:16" if residual else "None",
            "y_ptr": f"*{dtype}:16",
            **PART_ARGUMENTS,
            **x_strides,
            **STRIDE_ARGUMENTS,
        }
        | {"threshold": "i32", "scale": "fp32"}
        | ({"N": "1"} if narrow else {}),
        {"SHIFTED": int(shifted), "ROWS": launch.rows, "GROUPS": launch.groups},
        launch.warps,
    )


VARIANTS = (
    *(_variant(dtype, "1") for dtype in ("bf16", "fp16", "fp32")),
    _variant("bf16", "1", residual=True),
    _variant("bf16", "i32"),
    _variant("bf16", "1", shifted=True),
    _variant("bf16", "1", shifted=True, narrow=True),
)
