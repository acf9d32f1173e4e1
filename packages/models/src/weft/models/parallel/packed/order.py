"""The cut of a row over the context ranks: equally many tokens and nearly equal causal work for each rank.

A document is a contiguous stretch of a packed row, and its tokens attend within the document only. A row that is not
packed counts as a single document. Short documents stay whole on one rank, which then needs no keys of another rank. A
long document is cut into pieces.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from weft.kernels.extension import Runs
from weft.mesh.extension import chunk

# A rank's work may differ from the mean by this part of the mean. Measured on mixtures of documents of 16 to 8,192
# tokens, for 2 to 32 ranks: the busiest rank has at most 1.03 of the mean (1.04 with a slack of 0.02), and ranks
# receive 4 % fewer keys than with a slack of 0.01.
_SLACK = 0.015
_SHORTEST = 128  # a piece has at least 1 / 128 of a rank's tokens, where the choice is free


Windows = tuple[int | None, ...]  # by attention layer of the model; None for a layer without a window
NO_WINDOW: Windows = (None,)


def _work_before(place: int, layers: Mapping[int | None, int]) -> int:
    """The number of keys seen by the first `place` queries of a document, summed over layers.

    Query i sees min(i + 1, window) keys. layers: {window: number of layers with this window}.
    """
    work = 0
    for window, count in layers.items():
        full = place if window is None else min(place, window)
        work += count * (full * (full + 1) // 2 + (place - full) * full)
    return work


@lru_cache(maxsize=1024)
def balanced_order(tokens: int, parts: int) -> Runs:
    """The order of a sequence's tokens in which `parts` contiguous shards have equal causal work.

    Shards are cut as by `torch.chunk`. A shard pairs a run of early tokens, which attend to few keys, with a run of
    late tokens; the runs differ by at most a token in length. The order depends on the arguments alone.
    Called by `order_by_documents`.
    """
    runs: list[tuple[int, int]] = []
    head, tail = 0, tokens
    for part in range(parts):
        start, stop = chunk(tokens, parts, part)
        early = (stop - start + 1) // 2
        late = stop - start - early
        runs += [(head, head + early), (tail - late, tail)]
        head, tail = head + early, tail - late
    return tuple([run for run in runs if run[0] < run[1]])


@lru_cache(maxsize=4096)
def order_by_documents(lengths: tuple[int, ...], parts: int, windows: Windows = NO_WINDOW) -> Runs:
    """The order of a row's tokens in which `parts` contiguous shards have nearly equal causal work.

    lengths: of the documents, in reading order; (tokens,) for a row that is not packed.
    windows: of the model's attention layers, whose work is summed.
    Returns runs [start, stop) of the row, shard after shard, ascending within a shard. Shards are cut as by
    `torch.chunk`. The order depends on the arguments alone. A single document without a window gets `balanced_order`.
    """
    longest = max(lengths, default=0)
    layers = Counter(None if window is None or window >= longest else window for window in windows)
    if len(lengths) == 1 and [*layers] == [None]:
        return balanced_order(lengths[0], parts)
    return tuple([run for runs in _deal_out(lengths, parts, layers) for run in runs])


def _deal_out(lengths: Sequence[int], parts: int, layers: Mapping[int | None, int]) -> list[Runs]:
    """Deal the documents out to the shards; returns the runs of each shard. layers: {window: number of layers}.

    Longest processing time first (Graham 1969), with tokens as a second resource. Each rank has a target of tokens and
    a target of work, and lacks at first both. Documents are dealt out in the order of work per token, most first. m is
    the mean work per token of the documents still to deal. A rank's need is the work that the rank lacks, minus m times
    the tokens that the rank lacks. The neediest rank gets the whole document, if the shortest documents could then fill
    the rank's tokens without exceeding the rank's work. Otherwise the rank gets a piece: the most tokens for which the
    condition holds. A piece is a run from the document's head and a run from the tail, with the document's mean work
    per token. The remainder keeps this mean, and is dealt out next.
    """
    return _Dealing(lengths, parts, layers).runs()


class _Remainder(NamedTuple):
    """The tokens of a document not yet dealt out, at first all. Remainders sort by work per token, most first."""

    minus_density: float  # minus the mean work per token, so that a heap gives the most first
    begin: int  # the document's first token in the row
    start: int  # the remainder is [start, stop) of the document
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class _Dealing:
    """A row being dealt out to the ranks; see `_deal_out`."""

    def __init__(self, lengths: Sequence[int], parts: int, layers: Mapping[int | None, int]) -> None:
        self._layers = layers
        begins = [0, *accumulate(lengths)]
        total, tokens = sum(_work_before(length, layers) for length in lengths), begins[-1]
        sizes = [stop - start for start, stop in (chunk(tokens, parts, part) for part in range(parts))]
        # By rank: the tokens and the work still lacking, and the runs dealt so far.
        self._free = sizes
        self._lacking = [total * size / max(1, tokens) for size in sizes]
        self._dealt: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
        self._last = -1  # the rank of the latest run
        # What remains of each document, as a heap; the sums of tokens and work.
        self._pool = [
            self._remainder(begin, 0, length) for begin, length in zip(begins, lengths, strict=False) if length
        ]
        heapq.heapify(self._pool)
        self._pool_tokens, self._pool_work = tokens, float(total)
        # The tokens and the work of the n shortest documents together.
        ascending = sorted(length for length in lengths if length)
        self._low_tokens = [0, *accumulate(ascending)]
        self._low_work = [0, *accumulate(_work_before(length, layers) for length in ascending)]
        self._slack = _SLACK * total / parts
        self._shortest = 1 + sizes[0] // _SHORTEST

    def runs(self) -> list[Runs]:
        while self._pool:
            self._deal(heapq.heappop(self._pool))
        return [join_runs(runs) for runs in self._dealt]

    def _deal(self, remainder: _Remainder) -> None:
        """Give the neediest rank all or a piece of a document's remainder; tokens not given go back into the pool."""
        work = self._work(remainder.start, remainder.stop)
        remaining = self._pool_tokens - remainder.tokens
        mean = (self._pool_work - work) / remaining if remaining else 0.0
        needs = [lacking - mean * free for lacking, free in zip(self._lacking, self._free, strict=True)]
        fitting = [rank for rank, free in enumerate(self._free) if free >= remainder.tokens]
        if fitting:
            rank = self._neediest(fitting, needs)
            if self._absorbs(rank, remainder.tokens, work, mean):
                return self._give(rank, remainder, remainder.tokens, 0)
        rank = self._neediest([rank for rank, free in enumerate(self._free) if free], needs)
        most = min(self._free[rank], remainder.tokens)
        if not remaining:
            head = self._head(remainder, most, self._lacking[rank])
            return self._give(rank, remainder, head, most - head)

        def is_too_much(tokens: int) -> bool:  # of the remainder's mean work
            return not self._absorbs(rank, tokens, work * tokens / remainder.tokens, mean)

        count = max(bisect_left(range(1, most + 1), True, key=is_too_much), min(most, self._shortest))
        fills = count == self._free[rank]
        head = self._head(remainder, count, self._lacking[rank] if fills else work * count / remainder.tokens)
        self._give(rank, remainder, head, count - head)

    def _neediest(self, ranks: list[int], needs: list[float]) -> int:
        """A rank with nearly the largest need: the rank of the latest run, to keep neighbors together, else the rank
        with the most free tokens.
        """
        least = max(needs[rank] for rank in ranks) - self._slack / 4
        equal = [rank for rank in ranks if needs[rank] >= least]
        return self._last if self._last in equal else max(equal, key=lambda rank: (self._free[rank], -rank))

    def _absorbs(self, rank: int, tokens: int, work: float, mean: float) -> bool:
        """Whether the shortest documents can still fill all ranks after `rank` gets `tokens` and `work`.

        Checked for this rank and the ranks that lack less than `mean` work per token, without exceeding their work.
        """
        left, lack = self._free[rank] - tokens, self._lacking[rank] - work
        if lack >= mean * left - self._slack:
            return True
        below = [(lack / max(left, 1), left, lack)]
        for other, (free, lacking) in enumerate(zip(self._free, self._lacking, strict=True)):
            if other != rank and lacking < mean * free:
                below.append((lacking / max(free, 1), free, lacking))
        below.sort()  # whoever lacks the least work a token gets the shortest documents
        frees = accumulate(free for _, free, _ in below)
        lackings = accumulate(lacking for _, _, lacking in below)
        return all(lack >= self._least_work(free) - self._slack for free, lack in zip(frees, lackings, strict=True))

    def _least_work(self, tokens: int) -> float:
        """The work of the shortest documents that have `tokens` tokens together, the last document in part."""
        count = bisect_right(self._low_tokens, tokens) - 1
        work = float(self._low_work[count])
        if count + 1 < len(self._low_tokens):
            length = self._low_tokens[count + 1] - self._low_tokens[count]
            work += (tokens - self._low_tokens[count]) * (self._low_work[count + 1] - self._low_work[count]) / length
        return work

    def _head(self, remainder: _Remainder, tokens: int, work: float) -> int:
        """How many of a piece's `tokens` tokens to take from the remainder's head, for the piece to have `work`.

        The piece's further tokens come from the tail. The result is 0 or `tokens`, a piece from one end only, where
        the piece's work then differs from `work` by at most the slack.
        """

        def below(head: int) -> float:  # work minus the work with so many first tokens; ascending
            tail = tokens - head
            return (
                work
                - self._work(remainder.start, remainder.start + head)
                - self._work(remainder.stop - tail, remainder.stop)
            )

        if below(0) >= -self._slack:
            return 0
        if below(tokens) <= self._slack:
            return tokens
        return min(tokens, bisect_left(range(tokens), 0.0, key=below))

    def _give(self, rank: int, remainder: _Remainder, head: int, tail: int) -> None:
        """Give the rank a remainder's first `head` and last `tail` tokens; the tokens between go back into the pool."""
        self._last = rank
        between = remainder.start + head, remainder.stop - tail
        for start, stop in ((remainder.start, between[0]), (between[1], remainder.stop)):
            if start < stop:
                work = self._work(start, stop)
                self._free[rank] -= stop - start
                self._lacking[rank] -= work
                self._pool_tokens -= stop - start
                self._pool_work -= work
                self._dealt[rank].append((remainder.begin + start, remainder.begin + stop))
        if between[0] < between[1]:
            heapq.heappush(self._pool, self._remainder(remainder.begin, *between))

    def _remainder(self, begin: int, start: int, stop: int) -> _Remainder:
        return _Remainder(-self._work(start, stop) / (stop - start), begin, start, stop)

    def _work(self, start: int, stop: int) -> int:
        return _work_before(stop, self._layers) - _work_before(start, self._layers)


def join_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """The runs in ascending order, with adjacent runs joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return tuple(result)
