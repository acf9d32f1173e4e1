"""The chunks of the tokens, their parts, and the sweep over them: each part's logits by a GEMM, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, zip_longest

import torch
from torch import Tensor

from ..backend import on_cpu
from ..cross_entropy.function import Gather, passes_on
from ..cross_entropy.merged import Shard, Upstream

# The limit of memory above inputs and gradients: the logits' gradient of one chunk, the logits of the parts that are held at once, and
# the lower bits of a `Sum24`. A float32 sum that is not the gradient itself is not counted: chunks would get too small.
# Each chunk costs a pass over the weight gradient's sum: 6 bytes an element in 24 bits, 8 in float32. The chunk's three GEMMs, of
# 2 * tokens flop an element each, must take much longer. With an H200's 4.3 TB/s and 780 TFLOP/s, and no overlap, the pass takes 12% of
# their time in 24 bits at 1536 tokens, and 7% in float32 at 3584.
HELD_BYTES = 1 << 30
HELD_BYTES_ON_CPU = 1 << 26
PARTS_SHARE = 8  # of the limit one part's logits take an eighth: the GEMM of 256 tokens is still bound by its flop, not by the weight's bytes
TILE = 128  # rows of a GEMM
CAST_BYTES = 1 << 21  # on a CPU: the size of a block of the weight in float32


@dataclass(frozen=True, slots=True)
class Product:
    """The factors of the logits, and the target: x [N, H], weight [V, H], bias [V], classes [N]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    classes: Tensor

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the logits: float32 of factors in 16 bits, otherwise that of the factors."""
        return torch.promote_types(self.x.dtype, torch.float32)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """Of some rows, [n, V], in the memory of the first n rows of `out`; one GEMM, or one a block on a CPU. Never rounded to 16 bits."""
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
        for some, block in zip(torch.split(out, step, 1), torch.split(weight, step), strict=True):
            torch.mm(x, block.to(wide).mT, out=some)
        return out if self.bias is None else out.add_(self.bias)

    def space(self, tokens: int) -> Tensor:
        """Memory for the logits of so many tokens."""
        return self.x.new_empty(tokens, len(self.weight), dtype=self.wide)

    def gradient_space(self, chunks: list[slice]) -> Tensor | None:
        """Memory for the gradient of one chunk's logits, in the dtype of the factors. None where that takes the place of the logits."""
        return None if self.x.dtype == self.wide else self.x.new_empty(longest(chunks), len(self.weight))


def chunks_of(
    tokens: int, chunk_tokens: int | None, classes: int, held: int, like: Tensor, sum_bytes: int
) -> list[slice]:
    """Equal chunks of the tokens; the last one may be shorter. Without chunk_tokens there are as few as HELD_BYTES allows.

    classes: of the largest shard, if the vocabulary is sharded evenly: the same number on every rank.
    held: how many parts' logits are held at once.  like: of the dtype of the factors.  sum_bytes: held for a sum over several chunks. The
    logits and their gradient get at least half of HELD_BYTES.
    """
    if chunk_tokens is None:
        nbytes = _held_bytes(like)
        fitting = _fitting(nbytes, classes, held, like)
        if fitting < tokens:
            fitting = _fitting(max(nbytes // 2, nbytes - sum_bytes), classes, held, like)
        balanced = math.ceil(tokens / max(1, math.ceil(tokens / fitting)))  # as many chunks as needed, of equal length
        chunk_tokens = min(fitting, math.ceil(balanced / TILE) * TILE)
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, max(1, chunk_tokens))]


def part_tokens(classes: int, held: int, like: Tensor) -> int | None:
    """How many of a chunk's tokens have their logits in memory at once, in float32. None for all: of wide factors the gradient takes
    their place.

    The arguments are those of `chunks_of`.
    """
    if like.itemsize >= 4:
        return None
    return max(TILE, whole_tiles(_held_bytes(like) // PARTS_SHARE // (4 * held * max(1, classes))))


def parts_of(chunk: slice, tokens: int | None) -> list[slice]:
    """A chunk's rows, so many at a time; see `part_tokens`."""
    step = tokens or max(1, chunk.stop - chunk.start)
    return [slice(start, min(start + step, chunk.stop)) for start in range(chunk.start, chunk.stop, step)]


def longest(rows: list[slice]) -> int:
    return max((each.stop - each.start for each in rows), default=0)


def _held_bytes(like: Tensor) -> int:
    return HELD_BYTES_ON_CPU if on_cpu(like) else HELD_BYTES


def _fitting(nbytes: int, classes: int, held: int, like: Tensor) -> int:
    """The most tokens of a chunk that fits into so many bytes."""
    a_token, part = max(1, classes) * like.itemsize, part_tokens(classes, held, like)
    if part is None:
        return whole_tiles(nbytes // (held * a_token))
    of_part = 4 * held * max(1, classes)  # bytes of a token's logits
    left = nbytes - part * of_part  # for the gradient, where the chunk is no shorter than a part
    return whole_tiles(left // a_token if left >= part * a_token else nbytes // (a_token + of_part))


def whole_tiles(rows: int) -> int:
    """rows, rounded down to whole tiles of a GEMM. Fewer rows than one tile are left as they are, but for 0, which becomes 1."""
    return max(1, rows // TILE * TILE or rows)


@dataclass(frozen=True, slots=True)
class Swept:
    """A part of a chunk: its rows, and the statistics [shards, n, 3 to 6] of all shards.

    dlogits: with the last part of a chunk, the gradient of that chunk's logits; None where no gradient is computed.  chunk: its rows.
    """

    rows: slice
    gathered: Tensor
    chunk: slice
    dlogits: Tensor | None


def sweep(
    product: Product,
    weight: Tensor | None,
    shard: Shard,
    chunks: list[slice],
    tokens: int | None,
    upstream: Upstream | None,
    gather: Gather | None,
) -> Iterator[Swept]:
    """The parts of all chunks. tokens: of a part, see `part_tokens`.  upstream: where it is given, the logits' gradient is computed.

    While a part's statistics are gathered, the next part's logits are computed, in a second buffer.
    """
    passes = passes_on(product.x)
    parts = [(chunk, rows) for chunk in chunks for rows in parts_of(chunk, tokens)]
    gradients = None if upstream is None else product.gradient_space(chunks)

    def started(rows: slice, logits: Tensor, out: Tensor) -> Callable[[], Tensor]:
        classes = product.classes[rows]
        if gather is not None:
            return gather(passes.statistics(logits, classes, weight, shard))
        if upstream is None:
            statistics = passes.statistics(logits, classes, weight, shard)
        else:
            statistics, _ = passes.statistics_and_gradient(logits, classes, weight, upstream, shard, out)
        return lambda: statistics.unsqueeze(0)

    count, size = 1 if gather is None else min(2, len(parts)), longest([rows for _, rows in parts])
    spaces = cycle([product.space(size) for _ in range(count)])
    ahead: Tensor | None = None
    for (chunk, rows), following in zip_longest(parts, parts[1:]):
        logits = product.logits(rows, next(spaces)) if ahead is None else ahead
        out = logits if gradients is None else gradients[rows.start - chunk.start : rows.stop - chunk.start]
        arrived = started(rows, logits, out)
        ahead = None if gather is None or following is None else product.logits(following[1], next(spaces))
        gathered = arrived()
        if gather is not None and upstream is not None:
            passes.gradient(logits, product.classes[rows], weight, gathered, upstream, shard, out)
        is_last = rows.stop == chunk.stop and upstream is not None
        whole = logits if gradients is None else gradients[: chunk.stop - chunk.start]
        yield Swept(rows, gathered, chunk, whole if is_last else None)
