"""The chunks of the tokens, and the sweep over them: each chunk's logits by a GEMM, and their statistics."""

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

# The limit of memory above inputs and gradients: the logits of the chunks that are held at once, and the lower bits of a `Sum24`. A
# float32 sum that is not the gradient itself is not counted: chunks would get too small.
# Each chunk costs a pass over the weight gradient's sum: 6 bytes an element in 24 bits, 8 in float32. The chunk's three GEMMs, of
# 2 * tokens flop an element each, must take much longer. With an H200's 4.3 TB/s and 780 TFLOP/s, and no overlap, the pass takes 9% of
# their time in 24 bits at 2048 tokens, and 6% in float32 at 4096.
HELD_BYTES = 1 << 30
HELD_BYTES_ON_CPU = 1 << 26
TILE = 128  # rows of a GEMM


@dataclass(frozen=True, slots=True)
class Product:
    """The factors of the logits, and the target: x [N, H], weight [V, H], bias [V], classes [N]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    classes: Tensor

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """Of some rows, [n, V], in the memory of the first n rows of `out`; one GEMM."""
        x = self.x[rows]
        out = out[: len(x)]
        if self.bias is None:
            return torch.mm(x, self.weight.mT, out=out)
        return torch.addmm(self.bias, x, self.weight.mT, out=out)

    def space(self, chunks: list[slice]) -> Tensor:
        """Memory for the logits of one chunk."""
        longest = max((rows.stop - rows.start for rows in chunks), default=0)
        return self.x.new_empty(longest, len(self.weight))


def chunks_of(
    tokens: int, chunk_tokens: int | None, classes: int, held: int, like: Tensor, sum_bytes: int
) -> list[slice]:
    """Equal chunks of the tokens; the last one may be shorter. Without chunk_tokens there are as few as HELD_BYTES allows.

    classes: of the largest shard, if the vocabulary is sharded evenly: the same number on every rank.
    held: how many chunks' logits are held at once.  sum_bytes: held for a sum over several chunks. The logits get at least half of
    HELD_BYTES.
    """
    if chunk_tokens is None:
        nbytes = HELD_BYTES_ON_CPU if on_cpu(like) else HELD_BYTES
        a_token = held * max(1, classes) * like.itemsize
        fitting = whole_tiles(nbytes // a_token)
        if fitting < tokens:
            fitting = whole_tiles(max(nbytes // 2, nbytes - sum_bytes) // a_token)
        balanced = math.ceil(tokens / max(1, math.ceil(tokens / fitting)))  # as many chunks as needed, of equal length
        chunk_tokens = min(fitting, math.ceil(balanced / TILE) * TILE)
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, max(1, chunk_tokens))]


def whole_tiles(rows: int) -> int:
    """rows, rounded down to whole tiles of a GEMM. Fewer rows than one tile are left as they are, but for 0, which becomes 1."""
    return max(1, rows // TILE * TILE or rows)


def sweep(
    product: Product,
    weight: Tensor | None,
    shard: Shard,
    chunks: list[slice],
    upstream: Upstream | None,
    gather: Gather | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each chunk's rows, its logits, and the statistics [shards, n, 3 or 4] of all shards.

    upstream: where it is given, the logits' gradient has replaced the logits.
    While a chunk's statistics are gathered, the next chunk's logits are computed, in a second buffer.
    """
    passes = passes_on(product.x)

    def started(rows: slice, logits: Tensor) -> Callable[[], Tensor]:
        classes = product.classes[rows]
        if gather is not None:
            return gather(passes.statistics(logits, classes, weight, shard))
        if upstream is None:
            statistics = passes.statistics(logits, classes, weight, shard)
        else:
            statistics, _ = passes.statistics_and_gradient(logits, classes, weight, upstream, shard, logits)
        return lambda: statistics.unsqueeze(0)

    spaces = cycle([product.space(chunks) for _ in range(1 if gather is None else min(2, len(chunks)))])
    ahead: Tensor | None = None
    for rows, following in zip_longest(chunks, chunks[1:]):
        logits = product.logits(rows, next(spaces)) if ahead is None else ahead
        arrived = started(rows, logits)
        ahead = None if gather is None or following is None else product.logits(following, next(spaces))
        gathered = arrived()
        if gather is not None and upstream is not None:
            passes.gradient(logits, product.classes[rows], weight, gathered, upstream, shard, logits)
        yield rows, logits, gathered
