"""Launches the product kernels: chooses a configuration and allocates the splits' partial products."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..dispatch.backend import chip_of, device_of
from . import kernel
from .configurations import (
    Configuration,
    ProductClass,
    ProductKind,
    adapt_to_kind,
    choose_by_rule,
    find_measured,
    find_transposed,
    kind_of,
)

COMBINED = 32, 64  # rows and columns of a tile of the kernel `combine`
MOST_IN_GRID = 65_535  # CUDA's limit for programs along a grid's second and third dims


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
    """out = act(alpha * a @ b * scales + bias) + beta * residual; also writes the pre-activation to z, unless None.

    a: [M, K] or [B, M, K]; b with as many dims; any strides. bias: [N]. residual: expands to out.
    a_scale: a number or [M]; b_scale: a number or [N]; float32. out and z have the same strides.
    accumulate: out += a @ b, without an epilogue.
    slope: the name of an activation f: out = (a @ b) * f'(residual), without any further epilogue.
    More batches than MOST_IN_GRID are launched in parts.
    """
    if a.ndim == 3 and len(a) > MOST_IN_GRID:
        addend = None if residual is None else residual.expand(out.shape)
        for part in parts_of(len(a)):
            product(
                a[part], b[part], bias, None if addend is None else addend[part], a_scale, b_scale,
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
    chosen = configuration or choose_configuration(class_of(a, b, kind), a, aligned, (M, N, K))
    splits = max(1, min(chosen.splits, -(-K // chosen.tile_k)))
    split_size = -(-K // splits)
    split_size = K if splits == 1 else -(-split_size // chosen.tile_k) * chosen.tile_k
    uses_descriptors = chosen.descriptors and aligned
    partial = torch.empty((splits, batches, M, N), dtype=torch.float32, device=a.device) if splits > 1 else None
    expanded = out if residual is None else residual.expand(out.shape)
    vectors = (
        bias, None if residual is None else expanded, _scale(a_scale), _scale(b_scale)
    )  # fmt: skip
    vector_strides = (
        0 if bias is None else bias.stride(0), _batch(expanded), *expanded.stride()[-2:], _step(a_scale), _step(b_scale)
    )  # fmt: skip
    scalars = (None if alpha == 1 else alpha, None if beta == 1 else beta)
    tiles = -(-M // chosen.tile_m) * -(-N // chosen.tile_n)
    first, outputs = (out, (*vectors, out, z)) if partial is None else (partial[0], (None,) * 4 + (partial, None))
    with device_of(a):
        if uses_descriptors and a.is_cuda:
            triton.set_allocator(scratch)
        kernel.product[grid(tiles, chip_of(a.device)[1], batches, splits)](
            a, b, None, *outputs, None,
            M, N, K, split_size,
            _batch(a), *a.stride()[-2:], _batch(b), *b.stride()[-2:],
            *vector_strides, _batch(first), 0 if partial is None else partial.stride(0), *first.stride()[-2:],
            *(scalars if partial is None else (None, None)),
            DESCRIPTORS=uses_descriptors, A_BY_ROWS=a.stride(-1) == 1, B_BY_ROWS=b.stride(-1) == 1,
            PRECISION=precision(a),
            ACTIVATION=activation if partial is None else None, SLOPE=slope if partial is None else None,
            ACCUMULATE=accumulate and partial is None,
            SPECIALIZED=chosen.specialized and uses_descriptors,
            TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_M=chosen.group_m,
            PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
        if partial is not None:
            rows, cols = COMBINED
            # N is small where K is split, so the grid's second dim is large enough.
            kernel.combine[(-(-M // rows), -(-N // cols), batches)](
                partial, *vectors, out, z,
                M, N, splits,
                *partial.stride()[:3], *vector_strides, _batch(out), *out.stride()[-2:],
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
    """Writes out = silu(x @ gate) * (x @ up), and both products into z and z_up where given; x is read once for both.

    x: [M, K]. gate, up: [K, N] with the same strides. out, z and z_up have the same strides.
    """
    (M, K), N = x.shape, gate.shape[-1]
    if out.numel() == 0:
        return
    aligned = all(map(has_descriptor, (x, gate, up)))
    chosen = configuration or choose_configuration(class_of(x, gate, "gated"), x, aligned, (M, N, K))
    uses_descriptors = chosen.descriptors and aligned
    tiles = -(-M // chosen.tile_m) * -(-N // chosen.tile_n)
    with device_of(x):
        if uses_descriptors and x.is_cuda:
            triton.set_allocator(scratch)
        kernel.product[grid(tiles, chip_of(x.device)[1])](
            x, gate, up, None, None, None, None, out, z, z_up,
            M, N, K, K,
            0, *x.stride(), 0, *gate.stride(), 0, 0, 0, 0, 0, 0, 0, 0, *out.stride(),
            None, None,
            DESCRIPTORS=uses_descriptors, A_BY_ROWS=x.stride(-1) == 1, B_BY_ROWS=gate.stride(-1) == 1,
            PRECISION=precision(x), ACTIVATION=None, SLOPE=None, ACCUMULATE=False, SPECIALIZED=False,
            TILE_M=chosen.tile_m, TILE_N=chosen.tile_n, TILE_K=chosen.tile_k, GROUP_M=chosen.group_m,
            PARTS=chosen.parts,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def grid(tiles: int, processors: int, batches: int = 1, splits: int = 1) -> tuple[int, int, int]:
    """Returns (programs for each product, batches, splits). Each split of K of each batch is a product by itself.

    Programs loop over the tiles of a product. All products together get about as many programs as there are
    multiprocessors, and each product gets at least 1. tiles: of a product. processors: number of multiprocessors.
    """
    assert max(batches, splits) <= MOST_IN_GRID, "the caller launches more batches in parts"
    return min(tiles, max(1, -(-processors // (batches * splits)))), batches, splits


def parts_of(batches: int) -> list[slice]:
    """The batches of each launch, at most MOST_IN_GRID."""
    return [slice(start, min(batches, start + MOST_IN_GRID)) for start in range(0, batches, MOST_IN_GRID)]


def class_of(a: Tensor, b: Tensor, kind: ProductKind, groups: int = 1) -> ProductClass:
    """The class of the product of a [..., M, K] and b [..., K, N].

    If b has no leading dims, the leading dims of a count as rows. groups: the number of groups of M, or of K for
    "grouped_weights"; the class has the mean size of a group.
    """
    M, N, K = a.shape[-2] if b.ndim == a.ndim else math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    if kind == "grouped":
        M //= groups
    if kind == "grouped_weights":
        K //= groups
    return ProductClass.of(chip_of(a.device)[0], dtype_of(a, b), kind, find_transposed(a, b), M, N, K, groups)


def dtype_of(a: Tensor, b: Tensor) -> str:
    """`ProductClass.dtype` of a product: the factors' dtype, or both dtypes where 8-bit factors differ."""
    names = (str(each.dtype).removeprefix("torch.") for each in (a, b))
    return "tf32" if precision(a) == "tf32" else "-".join(dict.fromkeys(names))


def choose_configuration(of: ProductClass, a: Tensor, aligned: bool, sizes: tuple[int, int, int]) -> Configuration:
    """The measured configuration of the class, if memory is aligned; else by `choose_by_rule`. sizes: M, N and K."""
    measured = find_measured(of) if aligned else None
    return measured or adapt_to_kind(
        of.kind, choose_by_rule(of.chip, a.itemsize, aligned, *sizes, chip_of(a.device)[1])
    )


def has_descriptor(x: Tensor) -> bool:
    """Whether TMA can load tiles of x.

    True if a dim of the last two is contiguous, and the address and all further strides are multiples of 16 bytes.
    """
    rows, cols = x.stride()[-2:]
    if cols != 1:
        if rows != 1:
            return False
        rows = cols
    fits = min(x.shape[-2:]) > 0 and rows > 0 and max(x.shape[-2:]) < 2**31
    return fits and (rows * x.itemsize) % 16 == 0 and (_batch(x) * x.itemsize) % 16 == 0 and x.data_ptr() % 16 == 0


def _batch(x: Tensor) -> int:
    """The stride of the batch dim; 0 without a batch dim."""
    return x.stride(0) if x.ndim == 3 else 0


def _scale(scale: Tensor | None) -> Tensor | None:
    """A scale with a single dim; None stays None."""
    return None if scale is None else scale.reshape(-1)


def _step(scale: Tensor | None) -> int:
    """The stride of a scale for each row or column; 0 for a single number."""
    return 0 if scale is None or scale.numel() == 1 else scale.reshape(-1).stride(0)


def precision(a: Tensor) -> str:
    """Triton's input_precision: "tf32" for float32 where torch is set to tf32, else "ieee".

    torch is set by `torch.set_float32_matmul_precision` or `fp32_precision`.
    """
    if a.dtype != torch.float32 or not a.is_cuda:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def scratch(size: int, alignment: int, stream: Any) -> Tensor:
    """An allocator for Triton: memory in which a kernel writes TMA descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
