"""What the launches specialize, to be compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..aot import Variant
from ..matmul.configurations import GROUPED, ON_AMD, Configuration
from . import kernel

ALIGNED = "i32:16"
_STRIDES = {
    "rows_by_group": {
        "stride_an": ALIGNED, "stride_ak": "1", "stride_bg": ALIGNED, "stride_bk": ALIGNED, "stride_bm": "1",
        "stride_on": ALIGNED, "stride_om": "1",
    },
    "weights_by_group": {
        "stride_an": ALIGNED, "stride_ak": "1", "stride_gn": ALIGNED, "stride_gm": "1",
        "stride_og": ALIGNED, "stride_ok": ALIGNED, "stride_om": "1",
    },
}  # fmt: skip


def _variant(of: Any) -> Variant:
    name = of.__name__

    def launched(chosen: Configuration) -> Variant:
        if name == "rows_by_group":
            pointers = {"a_ptr": "*bf16:16", "b_ptr": "*bf16:16", "offsets_ptr": "*i32", "out_ptr": "*bf16:16"}
            sizes = {"N": "i32", "K": ALIGNED, "M": ALIGNED, "FIRST": "i32", "COUNT": "i32"}
            tiles = {
                "TILE_N": chosen.tile_m,
                "TILE_M": chosen.tile_n,
                "TILE_K": chosen.tile_k,
                "GROUP_N": chosen.group_m,
            }
        else:
            pointers = {"a_ptr": "*bf16:16", "grad_ptr": "*bf16:16", "offsets_ptr": "*i32", "out_ptr": "*bf16:16"}
            sizes = {"K": ALIGNED, "M": ALIGNED, "FIRST": "i32"}
            tiles = {
                "TILE_K": chosen.tile_m,
                "TILE_M": chosen.tile_n,
                "TILE_N": chosen.tile_k,
                "GROUP_K": chosen.group_m,
            }
        return Variant(
            f"grouped_matmul.{name}/bf16",
            of,
            pointers | sizes | _STRIDES[name],
            {"PRECISION": "ieee", **tiles},
            chosen.warps,
            chosen.stages,
        )

    return replace(launched(GROUPED), elsewhere={"gfx": launched(ON_AMD)})


VARIANTS = tuple(map(_variant, (kernel.rows_by_group, kernel.weights_by_group)))
