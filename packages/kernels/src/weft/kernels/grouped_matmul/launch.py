"""Launches the kernels: as many programs as there are multiprocessors, or a program for each tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import device_of
from ..matmul.configurations import GROUPED, INTERPRETED, ON_AMD, SINGLE, Configuration
from ..matmul.launch import INTERPRETED_PROGRAMS, chip_of, precision
from . import kernel


def forward(a: Tensor, b: Tensor, offsets: Tensor, first: int = 0) -> Tensor:
    """See `reference.forward`."""
    (N, K), (count, _, M) = a.shape, b.shape
    out = a.new_zeros(N, M)
    if out.numel() == 0 or count == 0:
        return out
    chosen, processors = _chosen(a)
    tiles = (-(-N // chosen.tile_m) + count) * -(
        -M // chosen.tile_n
    )  # at the most: each group may end in a part of a tile
    with device_of(a):
        kernel.rows_by_group[(min(tiles, processors),)](
            a, b, offsets, out,
            N, K, M, first, count, *a.stride(), *b.stride(), *out.stride(),
            PRECISION=precision(a),
            TILE_N=chosen.tile_m, TILE_M=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_N=chosen.group_m,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return out


def weights(a: Tensor, grad: Tensor, offsets: Tensor, first: int, count: int) -> Tensor:
    """See `reference.weights`."""
    K, M = a.shape[-1], grad.shape[-1]
    out = a.new_empty(count, K, M)
    if out.numel() == 0:
        return out
    chosen, _ = _chosen(a)
    tiles = -(-K // chosen.tile_m) * -(-M // chosen.tile_n)
    with device_of(a):
        kernel.weights_by_group[(tiles, count)](
            a, grad, offsets, out,
            K, M, first, *a.stride(), *grad.stride(), *out.stride(),
            PRECISION=precision(a),
            TILE_K=chosen.tile_m, TILE_M=chosen.tile_n, TILE_N=chosen.tile_k, GROUP_K=chosen.group_m,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return out


def _chosen(a: Tensor) -> tuple[Configuration, int]:
    if not a.is_cuda:
        return INTERPRETED, INTERPRETED_PROGRAMS
    chip, processors = chip_of(a.device)
    amd = chip.startswith("gfx")
    return SINGLE if a.dtype == torch.float32 else ON_AMD if amd else GROUPED, processors
