"""Launches the experts' kernels: a program for each multiprocessor, or for each tile of the weights' gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..dispatch.backend import chip_of, device_of
from ..grouped_matmul import launch as grouped
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
