"""Launches the grouped kernels: a program for each multiprocessor in `forward`, a program for each tile in `weights`.

Here N counts the rows, sorted by group, and each group has a matrix [K, M]. A `Configuration` names the tiles of a
product [M, K] @ [K, N]: tile_m, tile_n and tile_k cut N, M and K in `forward`, but K, M and N in `weights`.
"""

from __future__ import annotations

import triton
from torch import Tensor

from ..dispatch.backend import chip_of, device_of
from ..matmul.configurations import Configuration
from ..matmul.launch import MOST_IN_GRID, choose_configuration, class_of, has_descriptor, parts_of, precision, scratch
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
