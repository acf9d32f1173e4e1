"""Prices a trace's events on a chip, in seconds: `seconds_of` the device's work, `collective_seconds` of collectives.

No price gets longer where a peak or a bandwidth of the chip gets higher, or a latency lower. Measured numbers are in
the chip's file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .chip import Chip, Level
from .events import Compute, Event, Start

# Numbers of parts into which a product's K may be cut, to be computed at once, where tiles are fewer than
# multiprocessors. Split-K of cuBLAS, and Osama et al. 2023, "Stream-K", section 3: the parts are summed in float32.
SPLITS = (2, 4, 8, 16)
SHORTEST_SPLIT = 512  # least K of a part: the sum costs more than shorter parts save
FULL_TILE = 128  # a tile of 128 x 128 or more computes at the full rate; a smaller tile waits for more loads
ATTENTION_TILE = 128  # queries, and in backward keys, of a thread block: FlashAttention-2 and 3
SUM_BYTES = 4  # float32

_ITEMSIZES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """A collective's price."""

    seconds: float  # without further traffic on the links
    level: Level | None  # of the slowest links; None for a collective that takes no time


def seconds_of(compute: Compute, chip: Chip) -> float:
    """Seconds that a device takes for `compute`, without the host's time.

    By the chip's measured rate, where there is a rate for the op's part. Otherwise products are priced by
    `product_seconds`, attention by `_attention_seconds`, the rest by bytes divided by the reachable bandwidth; and each
    kernel takes `chip.launch_seconds` more, to start and to drain.
    Raises ValueError for a product in a dtype without a peak.
    """
    return _priced(compute if not compute.module else replace(compute, module=""), chip)


@lru_cache(maxsize=65536)
def _priced(compute: Compute, chip: Chip) -> float:
    measured = chip.measured_seconds(
        compute.name, compute.part, compute.dtype, compute.nbytes, compute.flops, compute.sizes
    )
    if measured is not None:
        return measured
    started = max(1, compute.num_launches) * chip.launch_seconds
    moved = compute.nbytes / chip.reachable_bandwidth
    if compute.kind == "attention":
        return started + max(moved, sum(_attention_seconds(compute, size, chip) for size in compute.sizes))
    if compute.kind != "product":
        return started + moved
    of_products = 0.0
    bytes_of_products = 0
    for size in compute.sizes:
        of_products += product_seconds(size, compute.dtype, chip)
        bytes_of_products += product_bytes(size, compute.dtype)
    # Operands beyond the products' own, as a bias or a gate's second half, are read and written too.
    return started + of_products + max(0, compute.nbytes - bytes_of_products) / chip.reachable_bandwidth


def product_bytes(size: Sequence[int], dtype: str) -> int:
    """Bytes of the operands and the result of a product (batch, M, N, K)."""
    batch, M, N, K = size
    return batch * (M * K + K * N + M * N) * _ITEMSIZES.get(dtype, 1)


def product_seconds(size: Sequence[int], dtype: str, chip: Chip) -> float:
    """Seconds of a product (batch, M, N, K), without the launch: measured where `chip.products` has the dtype, else:

    The result's tiles run on the multiprocessors in whole waves, each at the sustained peak. The best of the chip's
    tiles counts, as cuBLAS chooses (NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave
    quantization). A tile below 128 x 128 is slower, with more loads for each operation. Where tiles are fewer than
    multiprocessors and K is long, K is split, and the partial sums are written and read. The last wave's results are
    written after all operations, which slows a short K. No product is faster than moving the operands' bytes.
    """
    batch, M, N, K = size
    if not batch * M * N * K:
        return 0.0
    measured = chip.product_seconds(dtype, batch * M, N, K) if batch == 1 else None
    if measured is None and batch > 1:
        each = chip.product_seconds(dtype, M, N, K)
        measured = None if each is None else batch * each
    if measured is not None:
        return measured
    bandwidth = chip.reachable_bandwidth
    rate = chip.sustained_peak(dtype) / chip.multiprocessors  # FLOP/s of a multiprocessor
    computed = min(_tiled_seconds(batch, M, N, K, tile, rate, dtype, chip) for tile in chip.tiles)
    return max(computed, product_bytes(size, dtype) / bandwidth)


def _tiled_seconds(
    batch: int, M: int, N: int, K: int, tile: tuple[int, int], rate: float, dtype: str, chip: Chip
) -> float:
    height, width = tile
    tiles = batch * -(-M // height) * -(-N // width)
    # Elements loaded for each operation are in proportion to 1 / height + 1 / width.
    speed = min(1.0, 2 / FULL_TILE / (1 / height + 1 / width))
    one = 2 * height * width * K / (rate * speed)  # seconds of a tile
    bandwidth = chip.reachable_bandwidth
    written = min(tiles, chip.multiprocessors) * height * width * _ITEMSIZES.get(dtype, 2) / bandwidth
    best = -(-tiles // chip.multiprocessors) * one + written
    if tiles >= chip.multiprocessors:
        return best
    for parts in SPLITS:
        if parts * SHORTEST_SPLIT > K:
            break
        sums = 2 * parts * tiles * height * width * SUM_BYTES / bandwidth
        best = min(best, -(-tiles * parts // chip.multiprocessors) * one / parts + written + sums)
    return best


def _attention_seconds(compute: Compute, size: Sequence[int], chip: Chip) -> float:
    """Seconds of attention (batch, heads, kv_heads, T, S, head_dim), without the launch.

    The operations of `compute`, over the peak times `chip.attention_reachable`. `seconds_of` also counts the bytes.
    With fewer blocks of 128 queries (in backward: keys) than multiprocessors, some multiprocessors idle.
    """
    batch, heads, _, T, S, _ = size
    is_backward = compute.part == "backward"
    blocks = batch * heads * -(-(S if is_backward else T) // ATTENTION_TILE)
    busy = min(1.0, max(1, blocks) / chip.multiprocessors)
    peak = chip.peak(compute.dtype) * chip.attention_reachable["backward" if is_backward else "forward"]
    return compute.flops / len(compute.sizes) / (peak * busy)


def collective_seconds(start: Start, chip: Chip, *, world: int | None = None) -> float:
    """Seconds of a collective without further traffic on the links; 0 for a single rank. Arguments: see `transfer`."""
    return transfer(replace(start, number=0, module=""), chip, world=world).seconds  # equal transfers are priced once


@lru_cache(maxsize=65536)
def transfer(start: Start, chip: Chip, *, world: int | None = None) -> CollectivePrice:
    """The price of a collective, from a rank's received bytes, by the chip's measured rate of the kind or as follows.

    A measured rate of a purpose, as of "all-reduce of gradients", counts before the rate of the kind.
    The group uses the levels of `chip.levels_of`. world: as for `Chip.levels_of`.
    Bandwidth: a ring passes each byte over every rank's inner link; over an outer link, a node's members use all their
    adapters at once. The slowest level counts. In an all-to-all each rank receives directly from every member, by the
    rank's own adapter. A message has a single peer, and counts at the receiver; a send takes no time.
    Latency, as in NCCL's src/graph/tuning.cc, of n ranks on k nodes: a ring has n - 1 steps, k - 1 of these over the
    outer link. An all-reduce has twice as many, or by a tree 2 (n/k - 1) inner and 2 log2 k outer steps: the faster
    counts. An all-to-all sends to all peers side by side: a latency for each level.
    """
    if start.size <= 1 or start.kind == "send":
        return CollectivePrice(0.0, None)
    levels = chip.levels_of(start.size, start.stride, world=world)
    measured = chip.collectives.get(f"{start.kind} of {start.purpose}", chip.collectives.get(start.kind))
    if measured is not None:
        return CollectivePrice(measured.time(start.nbytes), levels[-1][0])
    if start.kind in ("recv", "send-recv"):
        level = levels[-1][0]
        return CollectivePrice(level.latency + start.nbytes / level.speed(2), level)
    if start.kind == "all-to-all":
        return _direct(start, levels)
    inside, slowest, seconds = 1, levels[0][0], 0.0
    ring, tree = 0.0, 0.0
    for level, members in levels:
        of_level = start.nbytes / (inside * level.speed(members))
        if of_level > seconds:
            slowest, seconds = level, of_level
        inside *= members
    outside = 1  # parts of the group that an outer level connects
    for level, members in reversed(levels):
        is_innermost = level is levels[0][0]
        ring += (outside * members - outside) * level.latency
        tree += (members - 1 if is_innermost else math.log2(members)) * level.latency
        outside *= members
    latency = 2 * min(ring, tree) if start.kind == "all-reduce" else ring
    return CollectivePrice(latency + seconds, slowest)


def _direct(start: Start, levels: Sequence[tuple[Level, int]]) -> CollectivePrice:
    """An all-to-all: each level carries the bytes of the peers outside the level below."""
    from_each = start.nbytes / (start.size - 1)
    inside, latency = 1, 0.0
    slowest, seconds = levels[0][0], 0.0
    for level, members in levels:
        peers = inside * (members - 1)
        of_level = from_each * peers / level.speed(members)
        if of_level > seconds:
            slowest, seconds = level, of_level
        latency += level.latency
        inside *= members
    return CollectivePrice(latency + seconds, slowest)


def fuse(events: Sequence[Event]) -> Iterator[Event]:
    """The events as compiled: neighbouring elementwise ops of torch become a single kernel.

    Neighbours fuse where both are ops of torch bound by memory, without a collective or a wait between. The result in
    between is then neither written nor read, which saves two thirds of the smaller op's bytes: two of three tensors of
    an op with two operands. Weft's ops and products do not fuse, because Inductor leaves foreign kernels alone.
    """
    waiting: Compute | None = None
    last_bytes = 0
    for event in events:
        if isinstance(event, Compute) and event.kind == "memory" and event.name.startswith("aten."):
            if waiting is None:
                waiting = event
            else:
                saved = 2 * min(last_bytes, event.nbytes) // 3
                waiting = replace(waiting, nbytes=waiting.nbytes + event.nbytes - saved)
            last_bytes = event.nbytes
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        yield event
    if waiting is not None:
        yield waiting
