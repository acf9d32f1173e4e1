"""Seconds of a trace's events on a chip: of work of the device, and of collectives.

`seconds_of` and `collective_seconds` are the two prices. Each is positive, and none gets longer where a peak or a
bandwidth of the chip gets higher, or a latency lower. What a rule cannot know is a number of the chip's file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .chip import Chip, Level
from .events import Compute, Event, Start

# A product's K is cut into parts, computed at once, only where the tiles are fewer than the multiprocessors; then into
# as many as these. Split-K of cuBLAS, and Osama et al. 2023, "Stream-K", section 3: the parts are summed in float32.
SPLITS = (2, 4, 8, 16)
SHORTEST_SPLIT = 512  # of K in a part: shorter parts do not pay their sum
FULL_TILE = 128  # a tile of 128 x 128 or more computes at the full rate; a smaller one waits for more loads
ATTENTION_TILE = 128  # queries, and in backward keys, of a thread block: FlashAttention-2 and 3
SUM_BYTES = 4  # float32

_ITEMSIZES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective's price. seconds: without other traffic on its links. level: the level of its slowest links."""

    seconds: float
    level: Level | None


def seconds_of(compute: Compute, chip: Chip) -> float:
    """Seconds that a device takes for `compute`, without the host's time.

    Measured rates of the chip decide: of the op's part, or of its products. Otherwise products are priced by tiles
    (`product_seconds`), attention by the operations of the pairs that are seen (`attention_seconds`), the rest by
    bytes over the reachable bandwidth. Each kernel takes `chip.launch_seconds` besides, to start and to drain.
    Raises ValueError for a product in a dtype of which the chip has no peak.
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
        return started + max(moved, sum(attention_seconds(compute, size, chip) for size in compute.sizes))
    if compute.kind != "product":
        return started + moved
    of_products = 0.0
    bytes_of_products = 0
    for size in compute.sizes:
        of_products += product_seconds(size, compute.dtype, chip)
        bytes_of_products += product_bytes(size, compute.dtype)
    # Further operands, as a bias or a gate's other half, are read and written besides the products' own.
    return started + of_products + max(0, compute.nbytes - bytes_of_products) / chip.reachable_bandwidth


def product_bytes(size: Sequence[int], dtype: str) -> int:
    """Bytes of the operands and the result of a product (batch, M, N, K)."""
    batch, M, N, K = size
    return batch * (M * K + K * N + M * N) * _ITEMSIZES.get(dtype, 1)


def product_seconds(size: Sequence[int], dtype: str, chip: Chip) -> float:
    """Seconds of a product (batch, M, N, K), without its launch.

    The result's tiles run on the multiprocessors in whole waves, each at the sustained peak. The best of the chip's
    tiles counts, as cuBLAS chooses (NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave
    quantization). A tile below 128 x 128 is slower as its loads for each operation are more. Where tiles are fewer
    than multiprocessors and K is long, K is split, and the partial sums are written and read. The last wave's
    results are written after its operations, so that a short K is slower. No product is faster than its bytes.
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


def attention_seconds(compute: Compute, size: Sequence[int], chip: Chip) -> float:
    """Seconds of attention (batch, heads, kv_heads, T, S, head_dim), without its launch.

    The operations of `compute` over the part's share of the peak, `chip.attention_reachable`. With
    fewer blocks of 128 queries (in backward: keys) than multiprocessors, the others idle.
    """
    batch, heads, _, T, S, _ = size
    is_backward = compute.part == "backward"
    blocks = batch * heads * -(-(S if is_backward else T) // ATTENTION_TILE)
    busy = min(1.0, max(1, blocks) / chip.multiprocessors)
    peak = chip.peak(compute.dtype) * chip.attention_reachable["backward" if is_backward else "forward"]
    return compute.flops / len(compute.sizes) / (peak * busy)


def collective_seconds(start: Start, chip: Chip, *, world: int | None = None) -> float:
    """Seconds of a collective without other traffic on its links; 0 for a group of one. See `transfer`."""
    return transfer(start, chip, world=world).seconds


@lru_cache(maxsize=65536)
def transfer(start: Start, chip: Chip, *, world: int | None = None) -> Transfer:
    """The price of a collective, from the bytes that a rank receives; by the chip's measured rates where it has them.

    world: ranks in the run. A group has the levels of `chip.levels_of`, with `inside` members in each part of a level.
    Bandwidth: a ring passes each byte over every rank's inner link, and over an outer link by the `inside` adapters
    of a node at once; the slowest level counts. An all-to-all sends to every member directly: of the bytes from
    outside, each rank receives its own by its own adapter. A send, its receive and a broadcast to two have one peer.
    Latency, as in NCCL's src/graph/tuning.cc, of n ranks on k nodes: a ring has n - 1 steps, of which k - 1 are over
    the outer link; an all-reduce has twice as many, or by a tree 2 (n/k - 1) inner and 2 log2 k outer steps, whichever
    is less. An all-to-all has a message to each peer, of which those within a node and those outside go side by
    side: a latency of each level.
    """
    if start.size <= 1 or start.kind == "send":
        return Transfer(0.0, None)
    levels = chip.levels_of(start.size, start.stride, world=world)
    measured = chip.collectives.get(start.kind)
    if measured is not None:
        return Transfer(measured.time(start.nbytes), levels[-1][0])
    if start.kind in ("recv", "send-recv"):
        level = levels[-1][0]
        return Transfer(level.latency + start.nbytes / level.speed(2), level)
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
    return Transfer(latency + seconds, slowest)


def _direct(start: Start, levels: Sequence[tuple[Level, int]]) -> Transfer:
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
    return Transfer(latency + seconds, slowest)


def fuse(events: Sequence[Event]) -> Iterator[Event]:
    """The events as a compiler runs them: neighbouring elementwise work of torch's own ops is one kernel.

    Neighbours fuse where both are ops of torch that are bounded by memory, with no collective or wait between. An
    intermediate result is then neither written nor read: of two neighbours, two thirds of the smaller one's bytes
    are saved, as of an op with two operands and a result. Weft's ops and products are kernels of their own, as
    Inductor leaves calls of foreign kernels alone.
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
