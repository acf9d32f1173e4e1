"""The exchange of keys under context parallelism of packed rows: which rank sends which keys to which.

A rank receives exactly the keys which its queries see and which it does not hold, each once. All messages follow from
the documents' lengths, so every rank computes the same messages without communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from weft.kernels.extension import Runs
from weft.mesh.extension import chunk


def shards_of(order: Runs, parts: int) -> list[Runs]:
    """The runs of each shard of a row laid out in `order`, cut as `torch.chunk` cuts."""
    tokens, place = sum(stop - start for start, stop in order), 0
    bounds = [chunk(tokens, parts, part) for part in range(parts)]
    shards: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for start, stop in order:
        for part, (first, last) in enumerate(bounds):
            low, high = start + max(0, first - place), start + min(stop - start, last - place)
            if low < high:
                shards[part].append((low, high))
        place += stop - start
    return [tuple(runs) for runs in shards]


def messages(order: Runs, lengths: Sequence[int], parts: int, window: int | None = None) -> dict[tuple[int, int], Runs]:
    """By (source, destination): the runs of keys that the destination's queries see and the source holds.

    Runs are [start, stop) of the row, ascending. order: of the row's tokens, in contiguous shards. lengths: of the
    documents, in reading order. window: as for attention.
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for document, pieces in groupby(_pieces(order, lengths, parts), key=lambda piece: piece.document):
        held = list(pieces)
        for rank in {piece.rank for piece in held}:
            stop = 0  # the keys before are in `found` already
            for query in held:
                if query.rank != rank:
                    continue
                start = document if window is None else max(document, query.start - window + 1)
                start, stop = max(start, stop), query.stop
                for key in held:
                    if key.rank != rank and max(key.start, start) < min(key.stop, stop):
                        found[key.rank, rank].append((max(key.start, start), min(key.stop, stop)))
    return {pair: _joined(runs) for pair, runs in sorted(found.items())}


class Exchange(NamedTuple):
    """The keys that a rank sends and receives, and those that its queries see. Made by `exchange_of`.

    The rank's rows count as one row after another: of tokens, of queries and of received keys.
    """

    sent: Tensor  # int64: the rank's tokens whose keys it sends, receiver after receiver
    sent_counts: tuple[int, ...]  # by receiver
    received_counts: tuple[int, ...]  # by sender
    arrangement: Tensor  # int64: where each received key, in reading order, is among those that arrive
    own: Tensor  # int32 [1, queries, 2]: first and stop of the rank's own keys that a query sees
    received: Tensor  # int32 [1, queries, 2]: first and stop of the received keys, in reading order, that a query sees

    def to(self, device: torch.device) -> Exchange:
        """The same exchange with its tensors on `device`."""
        sent, arrangement, own, received = (
            each.to(device) for each in (self.sent, self.arrangement, self.own, self.received)
        )
        return Exchange(sent, self.sent_counts, self.received_counts, arrangement, own, received)


def exchange_of(
    orders: Sequence[Runs], lengths: Sequence[Sequence[int]], parts: int, part: int, window: int | None = None
) -> Exchange:
    """The exchange of the rank with shard `part` of `parts`, for some rows.

    orders, lengths: of each row; see `messages`.
    """
    sent: list[list[Tensor]] = [[] for _ in range(parts)]  # places among this rank's tokens, by receiver
    arriving: list[list[Tensor]] = [[] for _ in range(parts)]  # places among the received keys, by sender
    own: list[Tensor] = []
    received: list[Tensor] = []
    tokens = keys = 0  # of this rank's rows before
    for order, documents in zip(orders, lengths, strict=True):
        pairs = messages(order, documents, parts, window)
        held = _tokens(shards_of(order, parts)[part])
        of_senders = [_tokens(pairs.get((other, part), ())) for other in range(parts)]
        arrived = torch.cat(of_senders).sort().values
        for other in range(parts):
            sent[other].append(tokens + torch.searchsorted(held, _tokens(pairs.get((part, other), ()))))
            arriving[other].append(keys + torch.searchsorted(arrived, of_senders[other]))
        begins = torch.tensor([0, *accumulate(documents)])
        first = begins[torch.searchsorted(begins, held, right=True) - 1]  # key that the query sees
        if window is not None:
            first = torch.maximum(first, held - window + 1)
        own.append(tokens + _between(held, first, held + 1))
        received.append(keys + _between(arrived, first, held))
        tokens, keys = tokens + len(held), keys + len(arrived)
    places = torch.cat([each for rows in arriving for each in rows])
    arrangement = torch.empty_like(places)
    arrangement[places] = torch.arange(len(places))
    return Exchange(
        torch.cat([each for rows in sent for each in rows]),
        tuple(sum(map(len, rows)) for rows in sent),
        tuple(sum(map(len, rows)) for rows in arriving),
        arrangement,
        torch.cat(own).int().unsqueeze(0),
        torch.cat(received).int().unsqueeze(0),
    )


class _Piece(NamedTuple):
    """Contiguous tokens of a document on one rank."""

    document: int  # the document's first token
    start: int
    stop: int
    rank: int


def _pieces(order: Runs, lengths: Sequence[int], parts: int) -> Iterator[_Piece]:
    """The pieces in reading order."""
    begins = [0, *accumulate(lengths)]
    for start, stop, rank in sorted((*run, rank) for rank, runs in enumerate(shards_of(order, parts)) for run in runs):
        first = bisect_right(begins, start) - 1
        for begin, end in pairwise(begins[first:]):
            if begin >= stop:
                break
            yield _Piece(begin, max(begin, start), min(end, stop), rank)


def _joined(runs: list[tuple[int, int]]) -> Runs:
    """The runs, ascending, with neighbours joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return tuple(result)


def _tokens(runs: Runs) -> Tensor:
    """int64: the tokens of the runs, run after run."""
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    starts, stops = torch.tensor(runs).unbind(1)
    sizes = stops - starts
    ends = sizes.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - (ends - sizes), sizes)


def _between(places: Tensor, first: Tensor, stop: Tensor) -> Tensor:
    """[queries, 2]: which of the ascending places are in [first, stop), as first and stop."""
    return torch.stack([torch.searchsorted(places, first), torch.searchsorted(places, stop)], 1)
