"""Chunks of tokens and parts of chunks, and the loop over them: a GEMM and the statistics for each part's logits.

A chunk is the tokens for which the logits' gradient is held at once. A part is the tokens of a chunk for which the
logits are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, zip_longest

import torch
from torch import Tensor

from ..cross_entropy.function import StartGather, select_passes
from ..cross_entropy.merged import LossShard, Upstream
from ..dispatch.backend import on_cpu

# The memory limit above inputs and gradients: the logits' gradient of one chunk, the logits of all parts held at
# once, and the lower bits of a `Sum24`. A float32 sum that is not itself the gradient is not counted: chunks would
# get too small. Each chunk costs a pass over the weight gradient's sum: 6 bytes an element in 24 bits, 8 in float32.
# The chunk's three GEMMs, of 2 * tokens flop an element each, must take much longer. With an H200's 4.3 TB/s and 780
# TFLOP/s, and no overlap, the pass takes 12% of the GEMMs' time in 24 bits at 1536 tokens, and 7% in float32 at 3584.
HELD_BYTES = 1 << 30
HELD_BYTES_ON_CPU = 1 << 26
# One part's logits take an eighth of the limit: the GEMM of 256 tokens is still bound by flop, not by the bytes of
# the weight.
PARTS_SHARE = 8
TILE = 128  # rows of a GEMM tile
CAST_BYTES = 1 << 21  # on a CPU: bytes of a block of the weight cast to float32


@dataclass(frozen=True, slots=True)
class LogitFactors:
    """The factors of the logits, and the target."""

    x: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    classes: Tensor  # [N], the target

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the logits: float32 for 16-bit factors, otherwise the factors' dtype."""
        return torch.promote_types(self.x.dtype, torch.float32)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """The logits [n, V] of some rows, written to the first n rows of `out`, never rounded to 16 bits.

        One GEMM; on a CPU with 16-bit factors, one for each block of the weight.
        """
        x, weight, wide = self.x[rows], self.weight, self.wide
        out = out[: len(x)]
        if x.dtype == wide:
            if self.bias is None:
                return torch.mm(x, weight.mT, out=out)
            return torch.addmm(self.bias, x, weight.mT, out=out)
        if not on_cpu(x):
            if self.bias is None:
                return torch.mm(x, weight.mT, out_dtype=wide, out=out)
            return torch.addmm(out.copy_(self.bias), x, weight.mT, out_dtype=wide, out=out)
        x, step = x.to(wide), max(1, CAST_BYTES // (wide.itemsize * max(1, x.shape[1])))
        for block_logits, block in zip(torch.split(out, step, 1), torch.split(weight, step), strict=True):
            torch.mm(x, block.to(wide).mT, out=block_logits)
        return out if self.bias is None else out.add_(self.bias)

    def logits_buffer(self, tokens: int) -> Tensor:
        """Memory for the logits of `tokens` tokens."""
        return self.x.new_empty(tokens, len(self.weight), dtype=self.wide)

    def gradient_buffer(self, chunks: list[slice]) -> Tensor | None:
        """Memory for the gradient of one chunk's logits, in the factors' dtype.

        None if the gradient overwrites the logits, because both have the same dtype.
        """
        return None if self.x.dtype == self.wide else self.x.new_empty(longest(chunks), len(self.weight))


def chunks_of(
    tokens: int, chunk_tokens: int | None, classes: int, buffers: int, like: Tensor, sum_bytes: int
) -> list[slice]:
    """Equal chunks of the tokens; the last may be shorter. Without chunk_tokens, as few chunks as HELD_BYTES allows.

    classes: of the largest shard if the vocabulary is sharded evenly: the same number on every rank.
    buffers: the number of parts whose logits are held at once.
    like: a tensor with the factors' dtype and device.
    sum_bytes: held for a sum over several chunks. The logits and their gradient get at least half of HELD_BYTES.
    """
    if chunk_tokens is None:
        nbytes = _held_bytes(like)
        fitting = _fitting(nbytes, classes, buffers, like)
        if fitting < tokens:
            fitting = _fitting(max(nbytes // 2, nbytes - sum_bytes), classes, buffers, like)
        length = math.ceil(tokens / max(1, math.ceil(tokens / fitting)))  # as many chunks as needed, of equal length
        chunk_tokens = min(fitting, math.ceil(length / TILE) * TILE)
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, max(1, chunk_tokens))]


def part_tokens(classes: int, buffers: int, like: Tensor) -> int | None:
    """The number of tokens in a part: how many tokens have their float32 logits in memory at once.

    None for all of a chunk's tokens: for factors of 32 bits or more the gradient overwrites the logits. For the
    arguments see `chunks_of`.
    """
    if like.itemsize >= 4:
        return None
    return max(TILE, whole_tiles(_held_bytes(like) // PARTS_SHARE // (4 * buffers * max(1, classes))))


def parts_of(chunk: slice, tokens: int | None) -> list[slice]:
    """The parts of a chunk: its rows, at most `tokens` at a time. tokens: from `part_tokens`."""
    step = tokens or max(1, chunk.stop - chunk.start)
    return [slice(start, min(start + step, chunk.stop)) for start in range(chunk.start, chunk.stop, step)]


def longest(rows: list[slice]) -> int:
    """The length of the longest slice; 0 without slices."""
    return max((each.stop - each.start for each in rows), default=0)


def _held_bytes(like: Tensor) -> int:
    """HELD_BYTES, or HELD_BYTES_ON_CPU, by the device of `like`."""
    return HELD_BYTES_ON_CPU if on_cpu(like) else HELD_BYTES


def _fitting(nbytes: int, classes: int, buffers: int, like: Tensor) -> int:
    """The most tokens in a chunk that fits into `nbytes`."""
    token_bytes, part = max(1, classes) * like.itemsize, part_tokens(classes, buffers, like)
    if part is None:
        return whole_tiles(nbytes // (buffers * token_bytes))
    logits_bytes = 4 * buffers * max(1, classes)  # bytes of a token's logits, in all buffers
    gradient_bytes = nbytes - part * logits_bytes  # for the gradient, if the chunk is at least as long as a part
    return whole_tiles(
        gradient_bytes // token_bytes
        if gradient_bytes >= part * token_bytes
        else nbytes // (token_bytes + logits_bytes)
    )


def whole_tiles(rows: int) -> int:
    """Round `rows` down to whole GEMM tiles. Less than one tile is left unchanged, except 0, which becomes 1."""
    return max(1, rows // TILE * TILE or rows)


@dataclass(frozen=True, slots=True)
class SweptPart:
    """A part after its logits and statistics were computed. Yielded by `sweep`."""

    rows: slice  # of the part
    gathered: Tensor  # statistics [shards, n, 3 to 6] of all shards
    chunk: slice  # rows of the part's chunk
    dlogits: Tensor | None  # with a chunk's last part, the gradient of the chunk's logits, if computed; otherwise None


def sweep(
    product: LogitFactors,
    weight: Tensor | None,
    shard: LossShard,
    chunks: list[slice],
    tokens: int | None,
    upstream: Upstream | None,
    gather: StartGather | None,
) -> Iterator[SweptPart]:
    """Iterate over the parts of all chunks, computing each part's logits and statistics.

    tokens: of a part, from `part_tokens`. upstream: if given, the logits' gradient is computed too.
    While a part's statistics are gathered, the next part's logits are computed in a second buffer.
    """
    passes = select_passes(product.x)
    parts = [(chunk, rows) for chunk in chunks for rows in parts_of(chunk, tokens)]
    gradients = None if upstream is None else product.gradient_buffer(chunks)

    def start_gather(rows: slice, logits: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Start the gather of a part's statistics; returns a function to wait for the result."""
        classes = product.classes[rows]
        if gather is not None:
            return gather(passes.statistics(logits, classes, weight, shard))
        if upstream is None:
            statistics = passes.statistics(logits, classes, weight, shard)
        else:
            statistics, _ = passes.statistics_and_gradient(logits, classes, weight, upstream, shard, out)
        return lambda: statistics.unsqueeze(0)

    count, size = 1 if gather is None else min(2, len(parts)), longest([rows for _, rows in parts])
    logits_buffers = cycle([product.logits_buffer(size) for _ in range(count)])
    next_logits: Tensor | None = None
    for (chunk, rows), following in zip_longest(parts, parts[1:]):
        logits = product.logits(rows, next(logits_buffers)) if next_logits is None else next_logits
        out = logits if gradients is None else gradients[rows.start - chunk.start : rows.stop - chunk.start]
        wait = start_gather(rows, logits, out)
        next_logits = (
            None if gather is None or following is None else product.logits(following[1], next(logits_buffers))
        )
        gathered = wait()
        if gather is not None and upstream is not None:
            passes.gradient(logits, product.classes[rows], weight, gathered, upstream, shard, out)
        is_last = rows.stop == chunk.stop and upstream is not None
        chunk_gradient = logits if gradients is None else gradients[: chunk.stop - chunk.start]
        yield SweptPart(rows, gathered, chunk, chunk_gradient if is_last else None)
