"""What the launches specialize, to be compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..aot import Variant
from ..matmul.configurations import BY_POINTERS, EIGHT_BITS, LARGE, MIDDLE, ON_AMD, Configuration, grouped
from ..matmul.variants import BYTES, EIGHT, eight_on
from . import kernel

ALIGNED = "i32:16"
ONE, NUMBERS = "*bf16:16", "*fp32:16"
_KINDS = {
    **dict.fromkeys(("bias_ptr", "residual_ptr", "z_ptr", "a_scale_ptr", "b_scale_ptr", "alpha", "beta"), "None"),
    "offsets_ptr": "*i32", **dict.fromkeys(("K", "M"), ALIGNED), **dict.fromkeys(("N", "FIRST", "COUNT"), "i32"),
    **dict.fromkeys(("stride_ak", "stride_biasm", "stride_rm", "stride_sn", "stride_sm", "stride_gm", "stride_om"), "1"),
    **dict.fromkeys(("stride_an", "stride_bg", "stride_biasg", "stride_rn", "stride_sg", "stride_gn"), ALIGNED),
    **dict.fromkeys(("stride_on", "stride_og", "stride_ok"), ALIGNED),
}  # fmt: skip


def _variant(
    name: str, of: Any, chosen: Configuration, out: str, activation: str | None = None, factors: str = "bf16", **given: str
) -> Variant:  # fmt: skip
    """given: the kinds of arguments that are others than usual. 8-bit matrices lie by columns, as tensor cores take them."""
    by_rows = factors != EIGHT

    def launched(chosen: Configuration, target: str = "") -> Variant:
        constexprs: dict[str, int | str | None] = {
            "DESCRIPTORS": int(chosen.descriptors), "B_BY_ROWS": int(by_rows), "PRECISION": "ieee", "ACTIVATION": activation,
            "ACCUMULATE": int(out == "fp32"), "PARTS": chosen.parts,
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
        multiplied = f"*{eight_on(target) if factors == EIGHT else factors}:16"
        kinds = _KINDS | dict.fromkeys(("a_ptr", "b_ptr", "grad_ptr"), multiplied) | {"out_ptr": f"*{out}:16"} | given
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

    elsewhere = {"sm_80": launched(BY_POINTERS, "sm_80"), "gfx": launched(ON_AMD, "gfx")}
    return replace(launched(grouped(chosen)), elsewhere=elsewhere)


VARIANTS = (
    _variant("rows_by_group/bf16", kernel.rows_by_group, LARGE, "bf16"),
    _variant(
        "rows_by_group/bf16-bias-silu-residual", kernel.rows_by_group, MIDDLE, "bf16", "silu",
        bias_ptr=ONE, residual_ptr=ONE, z_ptr=ONE,
    ),
    _variant(
        "rows_by_group/fp8-scales", kernel.rows_by_group, EIGHT_BITS, "bf16", factors=EIGHT, a_scale_ptr=NUMBERS, b_scale_ptr=NUMBERS
    ),
    _variant("weights_by_group/bf16-sum", kernel.weights_by_group, MIDDLE, "fp32"),
)  # fmt: skip
