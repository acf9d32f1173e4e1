"""Launches the kernels: as many programs as there are multiprocessors, or a program for each tile."""

from __future__ import annotations

import triton
from torch import Tensor

from ..backend import device_of
from ..matmul.configurations import Class, Configuration, by_measurement, by_rule, grouped
from ..matmul.launch import INTERPRETED_PROGRAMS, chip_of, has_descriptor, precision, scratch
from . import kernel


def forward(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    activation: str | None = None,
    first: int = 0,
    configuration: Configuration | None = None,
) -> None:
    """See `reference.forward`. z lies as out."""
    (N, K), (count, _, M) = a.shape, b.shape
    if out.numel() == 0 or count == 0:
        return
    aligned = a.stride(-1) == 1 and has_descriptor(a) and has_descriptor(b)
    chosen, processors = _chosen(a, aligned, N // count, M, K)
    chosen = configuration or chosen
    tiles = (-(-N // chosen.tile_m) + count) * -(
        -M // chosen.tile_n
    )  # at the most: each group may end in a part of a tile
    by_descriptors = chosen.descriptors and aligned
    with device_of(a):
        if by_descriptors and a.is_cuda:
            triton.set_allocator(scratch)
        kernel.rows_by_group[(min(tiles, processors),)](
            a, b, bias, offsets, out, z,
            N, K, M, first, count,
            *a.stride(), *b.stride(), *((0, 0) if bias is None else bias.stride()), *out.stride(),
            DESCRIPTORS=by_descriptors, B_BY_ROWS=b.stride(-1) == 1, PRECISION=precision(a), ACTIVATION=activation,
            TILE_N=chosen.tile_m, TILE_M=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_N=chosen.group_m, PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def weights(
    a: Tensor,
    grad: Tensor,
    offsets: Tensor,
    out: Tensor,
    first: int = 0,
    accumulate: bool = False,
    configuration: Configuration | None = None,
) -> None:
    """See `reference.weights`."""
    count, K, M = out.shape
    if out.numel() == 0:
        return
    aligned = all(each.stride(-1) == 1 and has_descriptor(each) for each in (a, grad))
    chosen = configuration or _chosen(a, aligned, K, M, len(a) // count)[0]
    tiles = -(-K // chosen.tile_m) * -(-M // chosen.tile_n)
    by_descriptors = chosen.descriptors and aligned
    with device_of(a):
        if by_descriptors and a.is_cuda:
            triton.set_allocator(scratch)
        kernel.weights_by_group[(tiles, count)](
            a, grad, offsets, out,
            K, M, first, *a.stride(), *grad.stride(), *out.stride(),
            DESCRIPTORS=by_descriptors, PRECISION=precision(a), ACCUMULATE=accumulate,
            TILE_K=chosen.tile_m, TILE_M=chosen.tile_n, TILE_N=chosen.tile_k, GROUP_K=chosen.group_m, PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def _chosen(a: Tensor, aligned: bool, M: int, N: int, K: int) -> tuple[Configuration, int]:
    """That of one group's product, of rows that are as many as of another; and how many programs run at once."""
    chip, processors = chip_of(a.device) if a.is_cuda else ("interpreted", INTERPRETED_PROGRAMS)
    measured = by_measurement(Class.of(chip, a.dtype, "fused", M, N, K)) if aligned else None
    found = measured or by_rule(chip, a.itemsize, aligned, M, N, K, processors)
    return grouped(found), processors
