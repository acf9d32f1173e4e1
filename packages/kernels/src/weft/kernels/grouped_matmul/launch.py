"""Launches the grouped kernels: a program for each multiprocessor in `forward`, a program for each tile in `weights`.

Here N counts the rows, sorted by group, and each group has a matrix [K, M]. A `Configuration` names the tiles of a
product [M, K] @ [K, N]: tile_m, tile_n and tile_k cut N, M and K in `forward`, but K, M and N in `weights`.

`VARIANTS`: the kernels in the launches, for compilation without a GPU by `launching.aot`. A string like "i32:16" is the
Triton type of a kernel's argument; see `launching.aot: Variant.arguments`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
from torch import Tensor

from ..dispatch.backend import chip_of, device_of
from ..launching.aot import Variant
from ..matmul.configurations import (
    BY_POINTERS,
    EIGHT_BITS,
    FLAT,
    LARGE,
    MIDDLE,
    NOT_ALIGNED,
    ON_AMD,
    SINGLE,
    Configuration,
    adapt_to_groups,
)
from ..matmul.launch import MOST_IN_GRID, choose_configuration, class_of, has_descriptor, parts_of, precision, scratch
from ..matmul.variants import BYTES, EIGHT, float8_of
from . import kernel


def forward(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    first: int = 0,
    configuration: Configuration | None = None,
) -> None:
    """Writes the rows of each group times the group's matrix, with epilogue, into out.

    `function._plain_rows_by_group` in Triton, with the same arguments. z has the strides of out.
    configuration: None to choose by shape.
    """
    (N, K), (count, _, M) = a.shape, b.shape
    if out.numel() == 0 or count == 0:
        return
    aligned = a.stride(-1) == 1 and has_descriptor(a) and has_descriptor(b)
    of = class_of(a, b[0], "grouped", count)
    chosen = configuration or choose_configuration(of, a, aligned, (N // count, M, K))
    # An upper bound: each group may end in a partial tile.
    tiles = (-(-N // chosen.tile_m) + count) * -(-M // chosen.tile_n)
    uses_descriptors = chosen.descriptors and aligned
    if b_scale is not None:
        b_scale = (b_scale[:, None] if b_scale.ndim == 1 else b_scale).expand(count, M)
    residual = None if residual is None else residual.expand(N, M)
    a_scale = None if a_scale is None else a_scale.expand(N)
    with device_of(a):
        if uses_descriptors and a.is_cuda:
            triton.set_allocator(scratch)
        kernel.rows_by_group[(min(tiles, chip_of(a.device)[1]),)](
            a, b, bias, residual, a_scale, b_scale, offsets.contiguous(), out, z,
            N, K, M, first, count,
            *a.stride(), *b.stride(), *_strides(bias, 2), *_strides(residual, 2),
            *_strides(a_scale, 1), *_strides(b_scale, 2), *out.stride(),
            None if alpha == 1 else alpha, None if beta == 1 else beta,
            DESCRIPTORS=uses_descriptors, B_BY_ROWS=b.stride(-1) == 1, PRECISION=precision(a), ACTIVATION=activation,
            TILE_N=chosen.tile_m, TILE_M=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_N=chosen.group_m,
            PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def weights(
    a: Tensor,
    grad: Tensor,
    offsets: Tensor,
    out: Tensor,
    alpha: float = 1.0,
    first: int = 0,
    accumulate: bool = False,
    configuration: Configuration | None = None,
) -> None:
    """Writes each group's alpha * a[rows].T @ grad[rows] into out; with `accumulate`, adds the product to out.

    `function._plain_weights_by_group` in Triton, with the same arguments. configuration: None to choose by shape.
    """
    count, K, M = out.shape
    if out.numel() == 0:
        return
    if count > MOST_IN_GRID:  # more groups than a grid's second dim holds
        for part in parts_of(count):
            weights(a, grad, offsets, out[part], alpha, first + part.start, accumulate, configuration)
        return
    aligned = all(each.stride(-1) == 1 and has_descriptor(each) for each in (a, grad))
    of = class_of(a.mT, grad, "grouped_weights", count)
    chosen = configuration or choose_configuration(of, a, aligned, (K, M, len(a) // count))
    tiles = -(-K // chosen.tile_m) * -(-M // chosen.tile_n)
    uses_descriptors = chosen.descriptors and aligned
    with device_of(a):
        if uses_descriptors and a.is_cuda:
            triton.set_allocator(scratch)
        kernel.weights_by_group[(tiles, count)](
            a, grad, offsets.contiguous(), out,
            K, M, first, *a.stride(), *grad.stride(), *out.stride(),
            None if alpha == 1 else alpha,
            DESCRIPTORS=uses_descriptors, PRECISION=precision(a), ACCUMULATE=accumulate,
            TILE_K=chosen.tile_m, TILE_M=chosen.tile_n, TILE_N=chosen.tile_k, GROUP_K=chosen.group_m,
            PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def _strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of an optional operand; zeros for `dims` dims if there is none."""
    return (0,) * dims if x is None else x.stride()


ALIGNED = "i32:16"  # a size or stride divisible by 16
BF16, FP32 = "*bf16:16", "*fp32:16"  # pointers to aligned memory
# Types of the arguments in most variants, by argument.
_KINDS = {
    **dict.fromkeys(("bias_ptr", "residual_ptr", "z_ptr", "a_scale_ptr", "b_scale_ptr", "alpha", "beta"), "None"),
    "offsets_ptr": "*i32", **dict.fromkeys(("K", "M"), ALIGNED), **dict.fromkeys(("N", "FIRST", "COUNT"), "i32"),
    **dict.fromkeys(
        ("stride_ak", "stride_biasm", "stride_rm", "stride_sn", "stride_sm", "stride_gm", "stride_om"), "1"
    ),
    **dict.fromkeys(("stride_an", "stride_bg", "stride_biasg", "stride_rn", "stride_sg", "stride_gn"), ALIGNED),
    **dict.fromkeys(("stride_on", "stride_og", "stride_ok"), ALIGNED),
}  # fmt: skip


def _variant(
    name: str, of: Any, chosen: Configuration, out: str, activation: str | None = None, factors: str = "bf16",
    **types: str
) -> Variant:  # fmt: skip
    """A variant of a kernel, in the configuration of the launches on each chip.

    name: in the reports of `launching.aot`.
    of: the kernel, `rows_by_group` or `weights_by_group`.
    chosen: the configuration, before `adapt_to_groups`. On chips without TMA, a configuration with descriptors is
        replaced.
    out, factors: dtypes of the output, and of a and b. 8-bit b is contiguous along K, as tensor cores need.
    types: argument types which replace types of `_KINDS`.
    """
    by_rows = factors != EIGHT

    def for_configuration(chosen: Configuration, target: str = "") -> Variant:
        constexprs: dict[str, int | str | None] = {
            "DESCRIPTORS": int(chosen.descriptors), "B_BY_ROWS": int(by_rows), "PRECISION": "ieee",
            "ACTIVATION": activation, "ACCUMULATE": int(out == "fp32"), "PARTS": chosen.parts,
        }  # fmt: skip
        if of is kernel.rows_by_group:
            tiles = {
                "TILE_N": chosen.tile_m,
                "TILE_M": chosen.tile_n,
                "TILE_K": chosen.tile_k,
                "GROUP_N": chosen.group_m,
            }
        else:
            tiles = {
                "TILE_K": chosen.tile_m,
                "TILE_M": chosen.tile_n,
                "TILE_N": chosen.tile_k,
                "GROUP_K": chosen.group_m,
            }
        constexprs |= tiles
        factor_type = f"*{float8_of(target) if factors == EIGHT else factors}:16"
        kinds = _KINDS | dict.fromkeys(("a_ptr", "b_ptr", "grad_ptr"), factor_type) | {"out_ptr": f"*{out}:16"} | types
        kinds |= {"stride_bk": ALIGNED if by_rows else "1", "stride_bm": "1" if by_rows else ALIGNED}
        return Variant(
            f"grouped_matmul.{name}",
            of,
            {each: kinds[each] for each in of.arg_names if each in kinds},
            {each: constexprs[each] for each in of.arg_names if each in constexprs},
            chosen.warps,
            chosen.stages,
            chosen.flop_per_byte(BYTES[factors]),
        )

    no_tma = {"sm_80": BY_POINTERS, "gfx": ON_AMD}
    elsewhere = {
        target: for_configuration(configuration, target)
        for target, configuration in no_tma.items()
        if chosen.descriptors
    }
    return replace(for_configuration(adapt_to_groups(chosen)), elsewhere=elsewhere)


# The main variants: together they contain all code of the launches.
VARIANTS = (
    _variant("rows_by_group/bf16", kernel.rows_by_group, LARGE, "bf16"),
    _variant(
        "rows_by_group/bf16-bias-silu-residual", kernel.rows_by_group, MIDDLE, "bf16", "silu",
        bias_ptr=BF16, residual_ptr=BF16, z_ptr=BF16,
    ),
    _variant(
        "rows_by_group/fp8-scales", kernel.rows_by_group, EIGHT_BITS, "bf16", factors=EIGHT,
        a_scale_ptr=FP32, b_scale_ptr=FP32,
    ),
    _variant("weights_by_group/bf16-sum", kernel.weights_by_group, MIDDLE, "fp32"),
)  # fmt: skip

# Argument types for `_variant`: of the largest epilogue, of scales, of an epilogue in float32, and of sizes and strides
# not divisible by 16.
EPILOGUE = {"bias_ptr": BF16, "residual_ptr": BF16, "z_ptr": BF16}
SCALES = {"a_scale_ptr": FP32, "b_scale_ptr": FP32}
WIDE = dict.fromkeys(EPILOGUE, "*fp32:16")
NOT_AT_16_BYTES = dict.fromkeys(
    ("K", "M", "stride_an", "stride_bg", "stride_bk", "stride_on", "stride_gn", "stride_og"), "i32"
)
# The same code in further configurations chosen by the rules, each with the epilogue that needs the most registers.
EXTRA_VARIANTS = (
    _variant("rows_by_group/bf16-large-gelu", kernel.rows_by_group, LARGE, "bf16", "gelu", **EPILOGUE),
    _variant("rows_by_group/bf16-flat-gelu", kernel.rows_by_group, FLAT, "bf16", "gelu", **EPILOGUE),
    _variant(
        "rows_by_group/bf16-not-aligned-gelu", kernel.rows_by_group, NOT_ALIGNED, "bf16", "gelu",
        **EPILOGUE, **NOT_AT_16_BYTES,
    ),
    _variant("rows_by_group/fp32-gelu", kernel.rows_by_group, SINGLE, "fp32", "gelu", "fp32", **WIDE),
    _variant(
        "rows_by_group/fp8-scales-gelu", kernel.rows_by_group, EIGHT_BITS, "bf16", "gelu", EIGHT, **EPILOGUE, **SCALES
    ),
    _variant("weights_by_group/bf16-large", kernel.weights_by_group, LARGE, "bf16"),
    _variant("weights_by_group/bf16-flat", kernel.weights_by_group, FLAT, "bf16"),
    _variant("weights_by_group/bf16-not-aligned-sum", kernel.weights_by_group, NOT_ALIGNED, "fp32", **NOT_AT_16_BYTES),
    _variant("weights_by_group/fp32-sum", kernel.weights_by_group, SINGLE, "fp32", factors="fp32"),
)  # fmt: skip
