"""Launches the attention kernels: chooses the blocks, and allocates outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..dispatch.backend import chip_of, device_of
from ..launching.launched import block_length
from ..matmul.launch import dtype_of, precision
from ..random.launch import signed
from . import kernel
from .options import Drop
from .ranges import Ranges

Kernel = Literal["forward", "backward_queries", "backward_keys"]


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """How a kernel is compiled and launched."""

    block_t: int  # queries of a block
    block_s: int  # keys of a block
    warps: int  # of a program
    stages: int  # of a program's loops, pipelined


INTERPRETED = AttentionLaunch(block_t=16, block_s=16, warps=1, stages=1)
# Chips whose tensor cores read factors from shared memory. Other chips read factors from registers, which leaves fewer
# of a thread's 255 for tiles and addresses. AMD's threads have 512 if a program has four warps of 64 threads. The
# numbers are registers of a thread for tiles and addresses; MASKED: with a softcap or dropout.
FROM_SHARED = "sm_90", "sm_100", "sm_103"
REGISTERS_FROM_SHARED, REGISTERS, MASKED_REGISTERS, AMD_REGISTERS = 120, 104, 80, 152
# KiB of shared memory that a program may have (CUDA C++ Programming Guide; AMD CDNA3 ISA), less 16 in which tiles of
# scores change their layout.
SHARED_KIB = {"sm_80": 163 - 16, "sm_90": 227 - 16, "sm_100": 227 - 16, "sm_103": 227 - 16}
FURTHER_CHIPS_SHARED_KIB, AMD_SHARED_KIB = 99 - 16, 64 - 16
# The most multiply-adds of a thread in one float32 product of two tiles, in forward and in backward. Without tensor
# cores each is an instruction, as loops are unrolled, and many are in flight; loading ahead would cost more registers.
UNROLLED, UNROLLED_BACKWARD = 512, 256
THREADS = 256  # of a program
# By chip, kernel and block_d. The fastest of 8 to 17 launches of each kernel on an H200 (Triton 3.6), for 16-bit
# numbers without a softcap or dropout: 2 rows of 8,192 tokens in documents of 500. On causal rows these launches are
# within 10 % of the fastest.
MEASURED: dict[tuple[str, Kernel, int], AttentionLaunch] = {
    ("sm_90", "forward", 64): AttentionLaunch(64, 64, warps=4, stages=3),
    ("sm_90", "backward_queries", 64): AttentionLaunch(64, 32, warps=4, stages=3),
    ("sm_90", "backward_keys", 64): AttentionLaunch(32, 64, warps=4, stages=3),
    ("sm_90", "forward", 128): AttentionLaunch(64, 64, warps=4, stages=3),
    ("sm_90", "backward_queries", 128): AttentionLaunch(64, 32, warps=4, stages=3),
}
# For kernels that spill registers with the blocks by `launch_of`'s rule (sm_80), or with the measured stages
# (sm_90: 3 stages spill 16 bytes with Triton 3.7). These do not spill. Neither do blocks of 128 keys on sm_90, which
# compute 1.11 times the products on documents of 500 tokens.
COMPILED: dict[tuple[str, Kernel, int], AttentionLaunch] = {
    ("sm_80", "backward_keys", 64): AttentionLaunch(32, 128, warps=8, stages=2),
    ("sm_90", "backward_keys", 128): AttentionLaunch(32, 64, warps=4, stages=2),
    ("gfx942", "backward_keys", 64): AttentionLaunch(32, 128, warps=4, stages=1),
}
# Blocks [rows, cols], the largest first. A program keeps the rows (queries; keys in `backward_keys`), and loads the
# columns.
BLOCKS = (128, 64), (64, 64), (64, 32), (32, 32), (32, 16), (16, 16)
BLOCKS_OF_FLOAT32 = (32, 32), (16, 16)


@lru_cache(maxsize=1024)
def launch_of(
    kernel: Kernel, chip: str, dtype: str, block_d: int, is_masked: bool, is_aligned: bool = True
) -> AttentionLaunch:
    """The launch in the tables above, or else the largest blocks that fit registers and shared memory.

    dtype: "tf32" for float32 that is multiplied in tf32. is_masked: with a softcap or dropout. is_aligned: whether a
    load moves 16 bytes; otherwise, one number.
    """
    if chip == "interpreted":
        return INTERPRETED
    known = (MEASURED | COMPILED).get((chip, kernel, block_d))
    if known is not None and dtype in ("bfloat16", "float16") and is_aligned and not is_masked:
        return known
    if chip.startswith("sm_"):
        warps, shared = 8, SHARED_KIB.get(chip, FURTHER_CHIPS_SHARED_KIB) * 1024
        most_stages = 1 if dtype == "float32" else 3 if kernel == "forward" else 2
        registers = REGISTERS_FROM_SHARED if chip in FROM_SHARED else MASKED_REGISTERS if is_masked else REGISTERS
        own_tiles = 1 if kernel == "forward" else 2  # in shared memory, beside the stages'
    else:
        warps, most_stages, shared, registers, own_tiles = 4, 1, AMD_SHARED_KIB * 1024, AMD_REGISTERS, 0
    itemsize = 4 if dtype in ("float32", "tf32") else 2
    unrolled = UNROLLED if kernel == "forward" else UNROLLED_BACKWARD
    # On sm_100 a small sum leaves tensor memory for two programs, and Triton then gives a thread 128 registers.
    is_shared = chip in FROM_SHARED[1:] and block_d <= 64
    blocks = BLOCKS_OF_FLOAT32 if dtype == "float32" else BLOCKS[1:] if is_shared else BLOCKS
    for rows, cols in blocks:
        fits = _registers(kernel, rows, cols, block_d, is_masked, is_aligned) <= registers * THREADS
        fits &= dtype != "float32" or rows * cols * block_d <= unrolled * THREADS
        own = own_tiles * rows * block_d * itemsize
        stages = min(most_stages, (shared - own) // (2 * cols * block_d * itemsize))
        if fits and stages >= min(2, most_stages):
            break
    t, s = (cols, rows) if kernel == "backward_keys" else (rows, cols)
    return AttentionLaunch(block_t=t, block_s=s, warps=warps, stages=max(1, stages))


def _registers(kernel: Kernel, rows: int, cols: int, block_d: int, is_masked: bool, is_aligned: bool) -> int:
    """An estimate of a program's registers: float32 sums and scores, and the addresses to load two tiles.

    forward and `backward_queries` sum one tile, `backward_keys` two. forward keeps a tile of scores; backward keeps
    weights and their gradients. With a softcap or dropout come 2 to 4 more tiles: the slope or the mask, and the tiles
    from which the mask is drawn, placed and (in `backward_keys`) transposed. An address takes two registers, and loads
    16 bytes (8 numbers) if memory is aligned.
    """
    sums = 2 if kernel == "backward_keys" else 1
    scores, masks = {"forward": (1, 2), "backward_queries": (2, 3), "backward_keys": (2, 4)}[kernel]
    addresses = 2 * cols * block_d // (8 if is_aligned else 1)
    return rows * (sums * block_d + (scores + masks * is_masked) * cols) + 2 * addresses


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: Ranges,
    sinks: Tensor | None = None,
    dropout: Drop | None = None,
    *,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    launch: AttentionLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, like query, and the logsumexp of each row's scores and its sink: float32 [B, heads, T].

    query: [B, T, heads * D]. key, value: [B, S, kv_heads * D]. sinks: [heads]. launch: None chooses by the device.
    """
    query, key, value = _rows(query), _rows(key), _rows(value)
    (B, T, width), S = query.shape, key.shape[1]
    heads, group = width // head_dim, width // max(1, key.shape[-1])
    output = torch.empty((B, T, width), dtype=query.dtype, device=query.device)
    lse = torch.empty((B, heads, T), dtype=torch.float32, device=query.device)
    if not lse.numel():
        return output, lse
    block_d, chip = block_length(head_dim), chip_of(query.device)[0]
    is_masked, is_aligned = softcap is not None or dropout is not None, _is_aligned(head_dim, query, key, value)
    chosen = launch or launch_of("forward", chip, dtype_of(query, key), block_d, is_masked, is_aligned)
    keys = ranges.keys.contiguous()
    drop, phased = _drop(dropout, B)
    with device_of(query):
        kernel.forward[(-(-T // chosen.block_t) * heads * B,)](
            query, key, value, keys, None if sinks is None else sinks.contiguous(), *drop.tensors,
            output, lse,
            T, S, heads, group,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], _batch_stride(keys), *drop.place_strides,
            *output.stride()[:2], *drop.strides,
            scale, softcap, *drop.numbers,
            PHASED=phased, PRECISION=precision(query), HEAD_DIM=head_dim, BLOCK_D=block_d,
            BLOCK_T=chosen.block_t, BLOCK_S=chosen.block_s, num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return output, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    ranges: Ranges,
    sinks: Tensor | None = None,
    dropout: Drop | None = None,
    *,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    grad_logsumexp: Tensor | None = None,
    launches: tuple[AttentionLaunch, AttentionLaunch] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks, each contiguous and of its tensor's dtype.

    grad: of the output. output, lse: what `forward` returned, or its results merged with those of further keys.
    grad_logsumexp: float32 [B, heads, T], or None for 0.
    launches: of the kernels `backward_queries` and `backward_keys`; None chooses by the device.
    """
    grad, query, key, value, output = (_rows(each) for each in (grad, query, key, value, output))
    (B, T, width), S = query.shape, key.shape[1]
    heads, group = width // head_dim, width // max(1, key.shape[-1])
    dquery, dkey, dvalue = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)
    )
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    block_d, chip = block_length(head_dim), chip_of(query.device)[0]
    is_masked, is_aligned = softcap is not None or dropout is not None, _is_aligned(head_dim, grad, query, key, value)
    of_queries, of_keys = launches or (
        launch_of("backward_queries", chip, dtype_of(query, key), block_d, is_masked, is_aligned),
        launch_of("backward_keys", chip, dtype_of(query, key), block_d, is_masked, is_aligned),
    )
    keys, queries = ranges.keys.contiguous(), ranges.queries.contiguous()
    drop, phased = _drop(dropout, B)
    constexprs: dict[str, Any] = {"PHASED": phased, "PRECISION": precision(query)}
    constexprs |= {"HEAD_DIM": head_dim, "BLOCK_D": block_d}
    with device_of(query):
        if delta.numel():
            kernel.backward_queries[(-(-T // of_queries.block_t) * heads * B,)](
                grad, query, key, value, output, lse,
                None if grad_logsumexp is None else grad_logsumexp.contiguous(), keys, *drop.tensors,
                dquery, delta,
                T, S, heads, group,
                *grad.stride()[:2], *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
                _batch_stride(keys), *drop.place_strides, *dquery.stride()[:2], *drop.strides,
                scale, softcap, *drop.numbers,
                **constexprs, BLOCK_T=of_queries.block_t, BLOCK_S=of_queries.block_s,
                num_warps=of_queries.warps, num_stages=of_queries.stages,
            )  # fmt: skip
        if dkey.numel():
            col_blocks = -(-(S + 7 * phased) // of_keys.block_s)
            kernel.backward_keys[(col_blocks * (heads // group) * B,)](
                grad, query, key, value, lse, delta, queries, *drop.tensors,
                dkey, dvalue,
                T, S, heads, group,
                *grad.stride()[:2], *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
                _batch_stride(queries), *drop.place_strides, *dkey.stride()[:2], *drop.strides,
                scale, softcap, *drop.numbers,
                **constexprs, BLOCK_T=of_keys.block_t, BLOCK_S=of_keys.block_s,
                num_warps=of_keys.warps, num_stages=of_keys.stages,
            )  # fmt: skip
    return dquery, dkey, dvalue, None if sinks is None else _sinks_gradient(sinks, lse, delta)


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum(exp(sink - lse) * delta) over the rows: a sink takes weight from all keys, and has no value."""
    share = torch.exp(sinks.to(torch.float32)[:, None] - lse)  # [B, heads, T]
    share = torch.where(lse == -torch.inf, 0.0, share)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


@dataclass(frozen=True, slots=True)
class _Drop:
    """A `Drop` as the kernels' arguments. Without dropout, the tensors are None and the numbers are not read."""

    tensors: tuple[Tensor | None, Tensor | None, Tensor | None]  # offsets_ptr, query_places_ptr, key_places_ptr
    place_strides: tuple[int, int]  # stride_qpb and stride_kpb, from batch to batch
    strides: tuple[int, int]  # head_stride and row_stride
    numbers: tuple[int, int, int, int, float]  # first_query, first_key, drop_key, threshold, drop_scale


def _drop(drop: Drop | None, B: int) -> tuple[_Drop, bool]:
    """The kernels' arguments for B batches, and PHASED: see `kernel`."""
    if drop is None:
        return _Drop((None, None, None), (0, 0), (0, 0), (0, 0, 0, 0, 1.0)), False
    places = [None if each is None else each.contiguous() for each in (drop.query_places, drop.key_places)]
    arguments = _Drop(
        (drop.offsets.expand(B).contiguous(), places[0], places[1]),
        (_batch_stride(places[0]), _batch_stride(places[1])),
        (drop.head_stride, drop.row_stride),
        (drop.first_query, drop.first_key, signed(drop.key), drop.threshold, drop.scale),
    )
    return arguments, drop.key_places is None and drop.head_stride % 8 == 0 and drop.row_stride % 8 == 0


def _batch_stride(x: Tensor | None) -> int:
    """The stride of dim 0; 0 for a size of 1, which stands for all batches."""
    return 0 if x is None or len(x) == 1 else x.stride(0)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy, in which the numbers of a token are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_aligned(head_dim: int, *tensors: Tensor) -> bool:
    """Whether heads begin at multiples of 16 bytes and Triton can know: 16 divides all strides."""
    rows = all(each.stride(1) % 16 == each.stride(0) % 16 == each.data_ptr() % 16 == 0 for each in tensors)
    return rows and head_dim * tensors[0].itemsize % 16 == 0
