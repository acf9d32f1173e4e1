"""The variants of the kernels in the launches, for compilation without a GPU by `launching.aot`.

A string like "i32:16" is the Triton type of a kernel's argument; see `launching.aot: Variant.arguments`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from ..matmul.variants import BYTES, EIGHT, float8_of
from . import kernel

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
