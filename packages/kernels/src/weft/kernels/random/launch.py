"""Launches the random kernels on the runs of a part, with a tile chosen for the runs' length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..dispatch.backend import device_of
from ..launching.aot import Variant
from . import kernel
from .philox import Ints, Part

OUTER_DIMS = 3  # how many dims the kernels unravel, besides the run


@dataclass(frozen=True, slots=True)
class FillLaunch:
    """The tile of a program, and the program's warps."""

    rows: int  # runs of a tile
    groups: int  # Philox blocks of each run
    warps: int
    lanes: int = 4  # elements of a block, 4 or 8


# Uniform: 16 elements a thread, four 16-byte stores of float32. Normal: 8, as float64 needs twice the registers. Both
# compile without spills for sm_80 to sm_100 and gfx942; the speed is not measured yet.
UNIFORM = FillLaunch(rows=1, groups=512, warps=4)
NORMAL = FillLaunch(rows=1, groups=256, warps=4)


def fitted(most: FillLaunch, length: int, shifted: bool) -> FillLaunch:
    """Return the launch for runs of `length`: as many short runs share a program as fit into the size of `most`."""
    blocks = max(1, -(-(length + (most.lanes - 1) * shifted) // most.lanes))
    groups = min(most.groups, 1 << (blocks - 1).bit_length())  # a power of two
    return FillLaunch(most.groups // groups, groups, most.warps, most.lanes)


def is_shifted(part: Part, lanes: int = 4) -> bool:
    """Whether a run of `part.runs()` may start within a block."""
    return part.offset % lanes != 0 or any(stride % lanes for stride in part.strides[:-1])


def grid(launch: FillLaunch, rows: int, length: int, shifted: bool) -> tuple[int]:
    """The grid, in its first dim only: the second and third hold at most 65535 programs."""
    across = -(-(length + (launch.lanes - 1) * shifted) // (launch.lanes * launch.groups))
    return (-(-rows // launch.rows) * across,)


def padded(outer: Ints, fill: int) -> Ints:
    """Sizes or strides of the outer dims, padded in front with `fill` to the three which the kernels unravel."""
    return (fill,) * (OUTER_DIMS - len(outer)) + outer


def uniform(out: Tensor, part: Part, key: int) -> None:
    """Writes `philox.as_uniform` of the part's elements into `out`: contiguous, of its shape, bf16, fp16 or fp32."""
    _fill(kernel.uniform, UNIFORM, out, part, signed(key))


def normal(out: Tensor, part: Part, key: int, std: float) -> None:
    """Writes std * `philox.as_normal` of the elements of `part` into `out`, as `uniform` does."""
    _fill(kernel.normal, NORMAL, out, part, signed(key), std)


def signed(key: int) -> int:
    """The bits of a key as an int64. Unsigned, half of all keys would be uint64, with a compilation of their own."""
    return key - 2**64 if key >= 2**63 else key


def _fill(function: Any, most: FillLaunch, out: Tensor, part: Part, *arguments: float) -> None:
    if out.numel() == 0:
        return
    runs = part.runs()
    if len(runs.sizes) > OUTER_DIMS + 1:  # rare: five dims, no two of which can be merged
        for i in range(len(out)):
            _fill(function, most, out[i], part.at(i), *arguments)
        return
    *outer, length = runs.sizes
    rows, shifted = math.prod(outer), is_shifted(runs)
    _, R1, R2 = padded(tuple(outer), 1)
    launch = fitted(most, length, shifted)
    with device_of(out):
        function[grid(launch, rows, length, shifted)](
            out,
            rows, R1, R2, length, runs.offset, *padded(runs.strides[:-1], 0),
            *arguments,
            SHIFTED=shifted, ROWS=launch.rows, GROUPS=launch.groups, num_warps=launch.warps,
        )  # fmt: skip


PART_ARGUMENTS = {"rows": "i32", "R1": "i32", "R2": "i32", "N": "i32:16"}
STRIDE_ARGUMENTS = {"offset": "i64", "stride_0": "i32", "stride_1": "i32", "stride_2": "i32", "key": "i64"}


def _variants(dtype: str, *, shifted: bool, is_column: bool = False) -> tuple[Variant, Variant]:
    """Both kernels for 16-byte aligned tensors with long runs. is_column: with runs of one element, as in a column."""
    name = f"{dtype}-{'column' if is_column else 'shifted' if shifted else 'aligned'}"
    arguments = {"out_ptr": f"*{dtype}:16", **PART_ARGUMENTS, **STRIDE_ARGUMENTS} | ({"N": "1"} if is_column else {})

    def constexprs(most: FillLaunch) -> dict[str, int]:
        launch = fitted(most, 1, shifted) if is_column else most
        return {"SHIFTED": int(shifted), "ROWS": launch.rows, "GROUPS": launch.groups}

    return (
        Variant(f"random.uniform/{name}", kernel.uniform, arguments, constexprs(UNIFORM), UNIFORM.warps),
        Variant(f"random.normal/{name}", kernel.normal, arguments | {"std": "fp32"}, constexprs(NORMAL), NORMAL.warps),
    )


VARIANTS = (
    *_variants("fp32", shifted=False),
    *_variants("bf16", shifted=False),
    *_variants("fp32", shifted=True),
    *_variants("bf16", shifted=True, is_column=True),
)
