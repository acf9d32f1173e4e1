"""What the launches specialize, to be compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..aot import Variant
from ..matmul.configurations import BY_POINTERS, LARGE, MIDDLE, ON_AMD, Configuration, grouped
from . import kernel

ALIGNED = "i32:16"
_KINDS = {
    **dict.fromkeys(("a_ptr", "b_ptr", "grad_ptr", "bias_ptr", "z_ptr"), "*bf16:16"), "offsets_ptr": "*i32",
    **dict.fromkeys(("K", "M"), ALIGNED), **dict.fromkeys(("N", "FIRST", "COUNT"), "i32"),
    **dict.fromkeys(("stride_ak", "stride_bm", "stride_biasm", "stride_gm", "stride_om"), "1"),
    **dict.fromkeys(("stride_an", "stride_bg", "stride_bk", "stride_biasg", "stride_gn"), ALIGNED),
    **dict.fromkeys(("stride_on", "stride_og", "stride_ok"), ALIGNED),
}  # fmt: skip


def _variant(name: str, of: Any, chosen: Configuration, out: str, activation: str | None, **given: str) -> Variant:
    """given: the kinds of arguments that are others than usual."""
    kinds = _KINDS | {"out_ptr": f"*{out}:16"} | given

    def launched(chosen: Configuration) -> Variant:
        constexprs: dict[str, int | str | None] = {
            "DESCRIPTORS": int(chosen.descriptors), "B_BY_ROWS": 1, "PRECISION": "ieee", "ACTIVATION": activation,
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
        return Variant(
            f"grouped_matmul.{name}",
            of,
            {each: kinds[each] for each in of.arg_names if each in kinds},
            {each: constexprs[each] for each in of.arg_names if each in constexprs},
            chosen.warps,
            chosen.stages,
        )

    return replace(launched(grouped(chosen)), elsewhere={"sm_80": launched(BY_POINTERS), "gfx": launched(ON_AMD)})


VARIANTS = (
    _variant("rows_by_group/bf16", kernel.rows_by_group, LARGE, "bf16", None, bias_ptr="None", z_ptr="None"),
    _variant("rows_by_group/bf16-bias-silu", kernel.rows_by_group, MIDDLE, "bf16", "silu"),
    _variant("weights_by_group/bf16-sum", kernel.weights_by_group, MIDDLE, "fp32", None),
)
