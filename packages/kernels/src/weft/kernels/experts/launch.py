"""Launches the experts' kernels: a program for each multiprocessor, or for each tile of the weights' gradients.

`VARIANTS`: the kernels as launched, by dtype and alignment, for `launching.aot` to compile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import chip_of, device_of
from ..grouped_matmul import launch as grouped
from ..launching.aot import Variant
from ..matmul.configurations import (
    BY_POINTERS,
    INTERPRETED,
    NOT_ALIGNED,
    ON_AMD,
    SINGLE,
    Configuration,
    adapt_to_groups,
    halve_tiles,
)
from ..matmul.launch import has_descriptor, precision
from ..matmul.variants import BYTES
from ..routing.launch import sum_rows
from ..routing.reference import invert
from . import kernel

# The epilogue of `gated_rows_backward` reads and writes five tensors: with 4 warps its unaligned form would spill.
BACKWARD_NOT_ALIGNED = replace(NOT_ALIGNED, warps=8)


def forward(
    x: Tensor,
    weights: Tensor,
    source: Tensor,
    offsets: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    out: Tensor,
    z_gate: Tensor | None,
    z_up: Tensor | None,
    size: int,
    configuration: Configuration | None = None,
) -> None:
    """Writes out, z_gate and z_up of `plain_forward`. A token's choices are added in the order of the choices.

    size: how many sorted rows to compute; further rows add nothing. configuration: None chooses by the device.
    """
    count, inner = gate.shape[:2]
    if not (size and count and inner):
        out.zero_()
        return
    offsets = offsets.clamp(max=size)
    gated = torch.empty((size, inner), dtype=x.dtype, device=x.device)
    y = torch.empty((size, down.shape[1]), dtype=x.dtype, device=x.device)
    if gate.stride() != up.stride():
        gate, up = gate.contiguous(), up.contiguous()
    chosen = halve_tiles(configuration or _choose(x, gate))
    with device_of(x):
        kernel.gated_rows[_programs(x, size, inner, count, chosen)](
            x, gate, up, source, offsets,
            gated, z_gate, z_up,
            x.shape[1], inner, count, weights.shape[1],
            *x.stride(), *gate.stride(), *gated.stride(),
            **_tiles(chosen), PRECISION=precision(x), GROUP_N=chosen.group_m, PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    grouped.forward(gated, down.mT, offsets, None, None, None, None, y, None)
    sum_rows(y, invert(source), weights, out, weights.shape[1], offsets)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    source: Tensor,
    offsets: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    z_gate: Tensor,
    z_up: Tensor,
    dx: Tensor | None,
    dweights: Tensor | None,
    dgate: Tensor | None,
    dup: Tensor | None,
    ddown: Tensor | None,
    configuration: Configuration | None = None,
) -> None:
    """Writes the gradients of `plain_backward` which are not None. configuration: None chooses by the device."""
    (size, inner), (count, hidden), choices = z_gate.shape, down.shape[:2], weights.shape[1]
    if not (size and count and inner and hidden):
        for each in (dx, dweights, dgate, dup, ddown):
            if each is not None:
                each.zero_()
        return
    offsets, weights = offsets.clamp(max=size), weights.contiguous()
    gated, z_dgate, z_dup = (torch.empty_like(z_gate) for _ in range(3))  # weight * h, and the gradients of both z
    chosen = configuration or _choose(grad, down)
    chosen = BACKWARD_NOT_ALIGNED if chosen is NOT_ALIGNED else chosen
    # The part of each tile of columns; zero for the rows of no expert here.
    parts = torch.zeros((-(-inner // chosen.tile_n), size), dtype=torch.float32, device=x.device)
    with device_of(x):
        kernel.gated_rows_backward[_programs(x, size, inner, count, chosen)](
            grad, down, weights, source, offsets, z_gate, z_up,
            gated, z_dgate, z_dup, parts,
            hidden, inner, count, choices,
            *grad.stride(), *down.stride(), z_gate.stride(0), parts.stride(0),
            **_tiles(chosen), PRECISION=precision(grad), GROUP_N=chosen.group_m, PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    if dweights is not None:
        dweights.zero_().view(-1).index_copy_(0, source[:size].long(), parts.sum(0).to(dweights.dtype))
    if ddown is not None:
        _weights(gated, grad, source, offsets, choices, ddown.mT, configuration)
    del gated
    if dgate is not None:
        _weights(z_dgate, x, source, offsets, choices, dgate, configuration)
    if dup is not None:
        _weights(z_dup, x, source, offsets, choices, dup, configuration)
    if dx is not None:
        of_rows = torch.empty((size, x.shape[1]), dtype=x.dtype, device=x.device)
        grouped.forward(z_dgate, gate, offsets, None, None, None, None, of_rows, None)
        grouped.forward(z_dup, up, offsets, None, of_rows, None, None, of_rows, None)  # added in place, tile by tile
        sum_rows(of_rows, invert(source), None, dx, choices, offsets)


def _weights(
    a: Tensor,
    x: Tensor,
    source: Tensor,
    offsets: Tensor,
    choices: int,
    out: Tensor,
    configuration: Configuration | None,
) -> None:
    """out[e] [I, H] = a[rows].T @ x[tokens of the rows], for the sorted rows of each expert e. a: [rows, I]."""
    count, inner, hidden = out.shape
    chosen = configuration or _choose(x, a)
    tiles = -(-inner // chosen.tile_m) * -(-hidden // chosen.tile_n)
    with device_of(x):
        kernel.weights_by_expert[(tiles * count,)](
            a, x, source, offsets, out,
            inner, hidden, choices,
            a.stride(0), *x.stride(), *out.stride(),
            PRECISION=precision(x), TILE_K=chosen.tile_m, TILE_M=chosen.tile_n, TILE_N=chosen.tile_k,
            GROUP_K=chosen.group_m, PARTS=chosen.parts, num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def _choose(x: Tensor, *factors: Tensor) -> Configuration:
    """The tiles of a product whose rows are gathered by pointers. Not tuned: there is no measurement yet."""
    chip = chip_of(x.device)[0]
    if chip == "interpreted":
        return INTERPRETED
    if x.dtype.itemsize == 4:
        return SINGLE
    if not all(map(has_descriptor, (x, *factors))):
        return NOT_ALIGNED
    return adapt_to_groups(ON_AMD if chip.startswith("gfx") else BY_POINTERS)


def _programs(x: Tensor, size: int, inner: int, count: int, chosen: Configuration) -> tuple[int]:
    """The grid: a program for each multiprocessor, or fewer if `size` rows of `count` experts have fewer tiles.

    inner: the number of columns. Each expert may end in a partial tile.
    """
    tiles = (-(-size // chosen.tile_m) + count) * -(-inner // chosen.tile_n)
    return (min(tiles, chip_of(x.device)[1]),)


def _tiles(chosen: Configuration) -> dict[str, int]:
    """The tile sizes as the kernels name them: N rows, M columns, K summed."""
    return {"TILE_N": chosen.tile_m, "TILE_M": chosen.tile_n, "TILE_K": chosen.tile_k}


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
