"""The experts' kernels as launched, by dtype and alignment, for `launching.aot` to compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..launching.aot import Variant
from ..matmul.configurations import (
    BY_POINTERS,
    NOT_ALIGNED,
    ON_AMD,
    SINGLE,
    Configuration,
    adapt_to_groups,
    halve_tiles,
)
from ..matmul.variants import BYTES
from . import kernel
from .launch import BACKWARD_NOT_ALIGNED

ALIGNED = "i32:16"
_SIZES = {
    **dict.fromkeys(("source_ptr", "offsets_ptr"), "*i32:16"), "dweights_ptr": "*fp32:16",
    **dict.fromkeys(("H", "I"), ALIGNED), **dict.fromkeys(("COUNT", "CHOICES"), "i32"),
}  # fmt: skip
_CONTIGUOUS = (
    "stride_xh", "stride_gh", "stride_oi", "stride_di",
)  # fmt: skip
_POINTERS = (
    "x_ptr", "gate_ptr", "up_ptr", "out_ptr", "z_gate_ptr", "z_up_ptr", "grad_ptr", "down_ptr", "weights_ptr",
    "hidden_ptr", "dgate_ptr", "dup_ptr", "a_ptr",
)  # fmt: skip


def _variant(name: str, of: Any, chosen: Configuration, dtype: str = "bf16", **types: str) -> Variant:
    """The variant `experts.NAME` of kernel `of`. types: types of arguments which are not aligned or contiguous."""

    def for_configuration(chosen: Configuration) -> Variant:
        chosen = halve_tiles(chosen) if of is kernel.gated_rows else chosen
        kinds = dict.fromkeys((each for each in of.arg_names if each.startswith("stride_")), ALIGNED)
        kinds |= dict.fromkeys(_CONTIGUOUS, "1") | dict.fromkeys(_POINTERS, f"*{dtype}:16") | _SIZES | types
        if of is kernel.weights_by_expert:
            kinds |= {"stride_oh": "1", "stride_oi": ALIGNED}
            tiles = {"TILE_K": chosen.tile_m, "TILE_M": chosen.tile_n, "TILE_N": chosen.tile_k}
        else:
            tiles = {"TILE_N": chosen.tile_m, "TILE_M": chosen.tile_n, "TILE_K": chosen.tile_k}
        constexprs: dict[str, int | str | None] = {
            **tiles, "PRECISION": "ieee", "GROUP_N": chosen.group_m, "GROUP_K": chosen.group_m, "PARTS": chosen.parts
        }  # fmt: skip
        return Variant(
            f"experts.{name}",
            of,
            {each: kinds[each] for each in of.arg_names if each in kinds},
            {each: constexprs[each] for each in of.arg_names if each in constexprs},
            chosen.warps,
            chosen.stages,
            chosen.flop_per_byte(BYTES[dtype], 2 if of is kernel.gated_rows else 1),
        )

    elsewhere = {"gfx": for_configuration(ON_AMD)} if chosen is BY_POINTERS else {}
    return replace(for_configuration(adapt_to_groups(chosen)), elsewhere=elsewhere)


VARIANTS = (
    _variant("gated_rows/bf16", kernel.gated_rows, BY_POINTERS),
    _variant("gated_rows_backward/bf16", kernel.gated_rows_backward, BY_POINTERS),
    _variant("weights_by_expert/bf16", kernel.weights_by_expert, BY_POINTERS),
)

NOT_AT_16_BYTES = dict.fromkeys(
    ("H", "I", "stride_xn", "stride_ge", "stride_gi", "stride_on", "stride_gn", "stride_de", "stride_dh", "stride_zn",
     "stride_an", "stride_oe"), "i32"
)  # fmt: skip
KERNELS = (kernel.gated_rows, kernel.gated_rows_backward, kernel.weights_by_expert)
# Further configurations the launches choose.
EXTRA_VARIANTS = (
    *(
        _variant(
            f"{of.__name__}/bf16-not-aligned",
            of,
            BACKWARD_NOT_ALIGNED if of is kernel.gated_rows_backward else NOT_ALIGNED,
            **NOT_AT_16_BYTES,
        )
        for of in KERNELS
    ),
    *(_variant(f"{of.__name__}/fp32", of, SINGLE, "fp32") for of in KERNELS),
)
