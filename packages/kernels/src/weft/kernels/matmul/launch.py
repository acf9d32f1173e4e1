"""Launches the kernels: memory for what they make, and the configuration."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..backend import chip_of, device_of
from . import kernel
from .configurations import Class, Configuration, Kind, by_measurement, by_rule, fitted, kind_of, transposed

COMBINED = 32, 64  # of a tile that the splits' products are added up in
MOST_IN_GRID = 65_535  # programs along a grid's second dim, and along its third: CUDA's limit


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    activation: str | None = None,
    slope: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate: bool = False,
    configuration: Configuration | None = None,
) -> None:
    """out = act(alpha * a @ b * scales + bias) + beta * residual, and z = what the activation is of; or out += a @ b.

    a: [M, K] or [B, M, K], b: as many dims, any strides. bias: [N]. residual: expands to out. a_scale: one number or
    [M]; b_scale: one or [N]; float32. out and z lie alike. accumulate: nothing follows the product.
    slope: an activation; out is the product times its derivative at the residual, and nothing else follows.
    Batches of more than MOST_IN_GRID are launched in parts.
    """
    if a.ndim == 3 and len(a) > MOST_IN_GRID:
        added = None if residual is None else residual.expand(out.shape)
        for part in parts_of(len(a)):
            product(
                a[part], b[part], bias, None if added is None else added[part], a_scale, b_scale,
                out[part], None if z is None else z[part], activation, slope, alpha, beta, accumulate, configuration,
            )  # fmt: skip
        return
    M, K = a.shape[-2:]
    N = b.shape[-1]
    batches = a.shape[0] if a.ndim == 3 else 1
    if out.numel() == 0:
        return
    aligned = has_descriptor(a) and has_descriptor(b)
    kind = kind_of(a, activation, alpha, residual, a_scale, b_scale, z)
    chosen = configuration or chosen_for(class_of(a, b, kind), a, aligned, (M, N, K))
    splits = max(1, min(chosen.splits, -(-K // chosen.tile_k)))
    split_size = -(-K // splits)
    split_size = K if splits == 1 else -(-split_size // chosen.tile_k) * chosen.tile_k
    by_descriptors = chosen.descriptors and aligned
    partial = torch.empty((splits, batches, M, N), dtype=torch.float32, device=a.device) if splits > 1 else None
    wide = out if residual is None else residual.expand(out.shape)
    vectors = (
        bias, None if residual is None else wide, _scale(a_scale), _scale(b_scale)
    )  # fmt: skip
    of_vectors = (
        0 if bias is None else bias.stride(0), _batch(wide), *wide.stride()[-2:], _step(a_scale), _step(b_scale)
    )  # fmt: skip
    scalars = (None if alpha == 1 else alpha, None if beta == 1 else beta)
    tiles = -(-M // chosen.tile_m) * -(-N // chosen.tile_n)
    first, ends = (out, (*vectors, out, z)) if partial is None else (partial[0], (None,) * 4 + (partial, None))
    with device_of(a):
        if by_descriptors and a.is_cuda:
            triton.set_allocator(scratch)
        kernel.product[grid(tiles, chip_of(a.device)[1], batches, splits)](
            a, b, None, *ends, None,
            M, N, K, split_size,
            _batch(a), *a.stride()[-2:], _batch(b), *b.stride()[-2:],
            *of_vectors, _batch(first), 0 if partial is None else partial.stride(0), *first.stride()[-2:],
            *(scalars if partial is None else (None, None)),
            DESCRIPTORS=by_descriptors, A_BY_ROWS=a.stride(-1) == 1, B_BY_ROWS=b.stride(-1) == 1, PRECISION=precision(a),
            ACTIVATION=activation if partial is None else None, SLOPE=slope if partial is None else None,
            ACCUMULATE=accumulate and partial is None,
            SPECIALIZED=chosen.specialized and by_descriptors,
            TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_M=chosen.group_m, PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
        if partial is not None:
            rows, cols = COMBINED
            kernel.combine[(-(-M // rows), -(-N // cols), batches)](  # no N that is split has so many columns
                partial, *vectors, out, z,
                M, N, splits,
                *partial.stride()[:3], *of_vectors, _batch(out), *out.stride()[-2:],
                *scalars,
                ACTIVATION=activation, SLOPE=slope, ACCUMULATE=accumulate, ROWS=rows, COLS=cols,
            )  # fmt: skip


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    z: Tensor | None,
    z_up: Tensor | None,
    configuration: Configuration | None = None,
) -> None:
    """out = silu(x @ gate) * (x @ up), and z and z_up the two products; x is read once for both.

    x: [M, K]. gate, up: [K, N], which lie alike. out, z and z_up lie alike.
    """
    (M, K), N = x.shape, gate.shape[-1]
    if out.numel() == 0:
        return
    aligned = all(map(has_descriptor, (x, gate, up)))
    chosen = configuration or chosen_for(class_of(x, gate, "gated"), x, aligned, (M, N, K))
    by_descriptors = chosen.descriptors and aligned
    tiles = -(-M // chosen.tile_m) * -(-N // chosen.tile_n)
    with device_of(x):
        if by_descriptors and x.is_cuda:
            triton.set_allocator(scratch)
        kernel.product[grid(tiles, chip_of(x.device)[1])](
            x, gate, up, None, None, None, None, out, z, z_up,
            M, N, K, K,
            0, *x.stride(), 0, *gate.stride(), 0, 0, 0, 0, 0, 0, 0, 0, *out.stride(),
            None, None,
            DESCRIPTORS=by_descriptors, A_BY_ROWS=x.stride(-1) == 1, B_BY_ROWS=gate.stride(-1) == 1,
            PRECISION=precision(x), ACTIVATION=None, SLOPE=None, ACCUMULATE=False, SPECIALIZED=False,
            TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_M=chosen.group_m, PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def grid(tiles: int, processors: int, batches: int = 1, splits: int = 1) -> tuple[int, int, int]:
    """Programs that go through the tiles of each product, batches, splits: as many programs in all as there are processors, or more
    where there are more products.
    """
    assert max(batches, splits) <= MOST_IN_GRID, "more are launched in parts"
    return min(tiles, max(1, -(-processors // (batches * splits)))), batches, splits


def parts_of(batches: int) -> list[slice]:
    """The batches of each launch."""
    return [slice(start, min(batches, start + MOST_IN_GRID)) for start in range(0, batches, MOST_IN_GRID)]


def class_of(a: Tensor, b: Tensor, kind: Kind, groups: int = 1) -> Class:
    """Of a [..., M, K] and b [..., K, N]; leading dims that b has not are rows. Of groups with as many rows, or inner ones, each."""
    M, N, K = a.shape[-2] if b.ndim == a.ndim else math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    if kind == "grouped":
        M //= groups
    if kind == "grouped_weights":
        K //= groups
    return Class.of(chip_of(a.device)[0], dtype_of(a, b), kind, transposed(a, b), M, N, K, groups)


def dtype_of(a: Tensor, b: Tensor) -> str:
    """As `Class` has it: two where those of 8 bits differ."""
    names = (str(each.dtype).removeprefix("torch.") for each in (a, b))
    return "tf32" if precision(a) == "tf32" else "-".join(dict.fromkeys(names))


def chosen_for(of: Class, a: Tensor, aligned: bool, sizes: tuple[int, int, int]) -> Configuration:
    """What was measured of the class, of aligned memory; else what the rule has. sizes: M, N and K."""
    measured = by_measurement(of) if aligned else None
    return measured or fitted(of.kind, by_rule(of.chip, a.itemsize, aligned, *sizes, chip_of(a.device)[1]))


def has_descriptor(x: Tensor) -> bool:
    """Whether TMA can load tiles of x: one of the last two dims has neighbours in memory, all else begins at 16 bytes."""
    rows, cols = x.stride()[-2:]
    if cols != 1:
        if rows != 1:
            return False
        rows = cols
    wide = min(x.shape[-2:]) > 0 and rows > 0 and max(x.shape[-2:]) < 2**31
    return wide and (rows * x.itemsize) % 16 == 0 and (_batch(x) * x.itemsize) % 16 == 0 and x.data_ptr() % 16 == 0


def _batch(x: Tensor) -> int:
    return x.stride(0) if x.ndim == 3 else 0


def _scale(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)


def _step(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.reshape(-1).stride(0)


def precision(a: Tensor) -> str:
    """Of float32: tf32 where torch is told so, by `torch.set_float32_matmul_precision` or `fp32_precision`; never otherwise."""
    if a.dtype != torch.float32 or not a.is_cuda:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def scratch(size: int, alignment: int, stream: Any) -> Tensor:
    """Where a kernel writes its descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
