"""Plans the order and the exchange of keys under context parallelism of packed rows, row by row of a batch.

`KeyExchange`: which rank sends which keys to which rank. A rank receives each key that the rank's queries see and
another rank holds, once. The messages follow from the lengths of the documents, so every rank computes equal messages
without communication. `RowOrders`: how each row of a batch is laid out over the context ranks, by the documents of the
row, with the exchanges of the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from weft.kernels.extension import Places, Runs, VisibleKeys
from weft.mesh.extension import chunk

from .order import NO_WINDOW, Windows, join_runs, order_by_documents

IntArray = NDArray[np.int64]  # [n]; numpy, since the host plans and must not wait for a device


def shards_of(order: Runs, parts: int) -> list[Runs]:
    """The runs of a row's tokens in each shard. order: of the row's tokens, cut into `parts` as by `torch.chunk`."""
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


def key_messages(
    order: Runs, lengths: Sequence[int], parts: int, window: int | None = None
) -> dict[tuple[int, int], Runs]:
    """The messages of a row: {(source shard, destination shard): runs of keys to send}. Called by `exchange_of`.

    The source holds the keys, and queries of the destination see the keys. Runs are [start, stop), ascending.
    order: the layout of the row's tokens, cut into `parts` shards; see `shards_of`.
    lengths: of the row's documents, in reading order.
    window: the attention's; None: a query sees all earlier keys of the document.
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for document, runs_of in groupby(_document_runs(order, lengths, parts), key=lambda run: run.document):
        held = list(runs_of)
        for shard in {run.shard for run in held}:
            stop = 0  # `found` has the keys before `stop` already
            for query in held:
                if query.shard != shard:
                    continue
                start = document if window is None else max(document, query.start - window + 1)
                start, stop = max(start, stop), query.stop
                for key in held:
                    if key.shard != shard and max(key.start, start) < min(key.stop, stop):
                        found[key.shard, shard].append((max(key.start, start), min(key.stop, stop)))
    return {pair: join_runs(runs) for pair, runs in sorted(found.items())}


@dataclass(frozen=True, slots=True, eq=False)
class KeyExchange:
    """The plan of an exchange for a rank: keys to send and to receive, and keys visible to each query.

    Made by `exchange_of`. Indices of tokens, queries and received keys count through this rank's rows laid end to end.
    """

    is_needed: bool  # whether any rank needs a key of another rank; equal on all ranks
    sent: Tensor  # [sent] int64: this rank's tokens whose keys are sent, receiver after receiver
    sent_counts: tuple[int, ...]  # keys by receiver
    received_counts: tuple[int, ...]  # keys by sender
    arrangement: Tensor  # [received] int64: arrived[arrangement] is in reading order; `arrived` is sender after sender
    places: Places  # of queries and received keys in the rows
    own: VisibleKeys  # which of the rank's own keys each query sees
    queries: slice  # from the first to the last query that sees a received key
    received: VisibleKeys  # which of the received keys, in reading order, each of these queries sees

    def to(self, device: torch.device) -> KeyExchange:
        """The same exchange with its tensors on `device`."""
        return replace(
            self,
            sent=self.sent.to(device),
            arrangement=self.arrangement.to(device),
            places=Places(*(each.to(device) for each in self.places)),
            own=self.own.to(device),
            received=self.received.to(device),
        )


def exchange_of(
    orders: Sequence[Runs],
    lengths: Sequence[Sequence[int]],
    members: Sequence[int],
    part: int,
    window: int | None = None,
) -> KeyExchange:
    """Plan the exchange of the rank with shard `part`, for the rank's rows.

    Called by `RowOrders.exchange`, once for a batch and a window: layers with equal windows share the plan.
    orders, lengths, window: as for `key_messages`; an order and lengths for each row.
    members: members[i] is the shard of the process group's rank i. Senders and receivers are listed by i.
    """
    parts = len(members)
    sent: list[list[IntArray]] = [[] for _ in members]  # places among this rank's tokens, by receiver
    arriving: list[list[IntArray]] = [[] for _ in members]  # places among the received keys, by sender
    places: list[tuple[IntArray, IntArray, IntArray]] = []
    own: list[IntArray] = []
    received: list[IntArray] = []
    tokens = keys = 0  # tokens, and received keys, of the rows so far
    is_needed = False
    for row, (order, documents) in enumerate(zip(orders, lengths, strict=True)):
        pairs = key_messages(order, documents, parts, window)
        is_needed = is_needed or bool(pairs)
        held = tokens_of(shards_of(order, parts)[part])
        of_senders = [tokens_of(pairs.get((member, part), ())) for member in members]
        arrived = np.sort(np.concatenate(of_senders))
        for i, member in enumerate(members):
            sent[i].append(tokens + np.searchsorted(held, tokens_of(pairs.get((part, member), ()))))
            arriving[i].append(keys + np.searchsorted(arrived, of_senders[i]))
        begins = np.array([0, *accumulate(documents)])
        first = begins[np.searchsorted(begins, held, side="right") - 1]  # the first key that each query sees
        if window is not None:
            first = np.maximum(first, held - window + 1)
        own.append(tokens + _between(held, first, held + 1))
        received.append(keys + _between(arrived, first, held))
        places.append((held, np.full_like(held, row), arrived))
        tokens, keys = tokens + len(held), keys + len(arrived)
    arrival = np.concatenate([each for rows in arriving for each in rows])
    of_received = np.concatenate(received)
    seeing = np.flatnonzero(of_received[:, 0] < of_received[:, 1])
    queries = slice(int(seeing[0]), int(seeing[-1]) + 1) if len(seeing) else slice(0, 0)
    return KeyExchange(
        is_needed=is_needed,
        sent=torch.from_numpy(np.concatenate([each for rows in sent for each in rows])),
        sent_counts=tuple([sum(map(len, rows)) for rows in sent]),
        received_counts=tuple([sum(map(len, rows)) for rows in arriving]),
        arrangement=inverse(torch.from_numpy(arrival)),
        places=Places(*(torch.from_numpy(np.concatenate(each)) for each in zip(*places, strict=True))),
        own=_visible_keys(np.concatenate(own), tokens),
        queries=queries,
        received=_visible_keys(of_received[queries], keys),
    )


def inverse(permutation: Tensor) -> Tensor:
    """The inverse permutation: `inverse(p)[p]` is 0, 1, 2, …"""
    result = torch.empty_like(permutation)
    result[permutation] = torch.arange(len(permutation), device=permutation.device)
    return result


class _DocumentRun(NamedTuple):
    """Contiguous tokens of a document in a single shard."""

    document: int  # the document's first token
    start: int  # the run is [start, stop) of the row
    stop: int
    shard: int


def _document_runs(order: Runs, lengths: Sequence[int], parts: int) -> Iterator[_DocumentRun]:
    """The runs of a row's documents, in reading order. Arguments as for `key_messages`."""
    begins, shards = [0, *accumulate(lengths)], shards_of(order, parts)
    for start, stop, shard in sorted((*run, shard) for shard, runs in enumerate(shards) for run in runs):
        first = bisect_right(begins, start) - 1
        for begin, end in pairwise(begins[first:]):
            if begin >= stop:
                break
            yield _DocumentRun(begin, max(begin, start), min(end, stop), shard)


def tokens_of(runs: Runs) -> IntArray:
    """The tokens of the runs, run after run."""
    if not runs:
        return np.empty(0, dtype=np.int64)
    starts, stops = np.array(runs, dtype=np.int64).T
    sizes = stops - starts
    tokens: IntArray = np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)
    return tokens


def _between(places: IntArray, first: IntArray, stop: IntArray) -> IntArray:
    """[queries, 2]: for each query, the index range of the ascending `places` that are in [first, stop)."""
    return np.stack([np.searchsorted(places, first), np.searchsorted(places, stop)], 1)


def _visible_keys(keys: IntArray, count: int) -> VisibleKeys:
    """keys: [queries, 2], the range of keys that each query sees. count: the number of keys; see `VisibleKeys.of`."""
    return VisibleKeys.of(torch.from_numpy(keys.astype(np.int32)), count)


_LATEST = "_row_orders"  # attribute of a tensor of documents: the latest ((parts, windows, ids as bytes), `RowOrders`)


@dataclass(frozen=True, slots=True, eq=False)
class RowOrders:
    """For each row, the order of tokens by the row's documents. Made by `lay_out_batch`, equal on every rank.

    Layers get a RowOrders as the attribute `order` of an argument, as they get the order of rows without documents.
    """

    orders: tuple[Runs, ...]  # for each row: runs [start, stop) of the row, in the order of the layout
    lengths: tuple[tuple[int, ...], ...]  # of each row's documents
    parts: int  # context ranks
    _exchanges: dict[object, KeyExchange] = field(default_factory=dict, repr=False)  # made by `exchange`

    @classmethod
    def of(cls, documents: Tensor, parts: int, windows: Windows = NO_WINDOW) -> RowOrders:
        """The orders of rows whose documents have the ids `documents` [B, T], on the CPU.

        The tensor keeps the latest result, which is returned again for equal ids, parts and windows.
        windows: of the model's attention layers.
        Raises ValueError for a document that comes back after its end.
        """
        key = parts, windows, documents.numpy().tobytes()  # bytes, since a loader may refill the tensor
        latest: tuple[tuple[int, Windows, bytes], RowOrders] | None = getattr(documents, _LATEST, None)
        if latest is None or latest[0] != key:
            lengths = tuple([_document_lengths(ids, row) for row, ids in enumerate(documents)])
            orders = cls(tuple([order_by_documents(each, parts, windows) for each in lengths]), lengths, parts)
            latest = key, orders
            setattr(documents, _LATEST, latest)
        return latest[1]

    def is_same(self, order: object) -> bool:
        """Whether `order` is an equal RowOrders: equal layouts and equal documents."""
        return isinstance(order, RowOrders) and (order.orders, order.lengths) == (self.orders, self.lengths)

    def rows(self, start: int, stop: int) -> RowOrders:
        """The orders of rows `start` to `stop` - 1."""
        return RowOrders(self.orders[start:stop], self.lengths[start:stop], self.parts)

    def places(self, device: torch.device) -> Tensor:
        """[B, T] int64: entry (b, i) is the place in row b, in reading order, of the token laid out at i."""
        return torch.from_numpy(np.stack([tokens_of(order) for order in self.orders])).to(device)

    def as_read(self, whole: Tensor) -> Tensor:
        """Bring the tokens of a plain tensor [B, T, ...] from the order of the layout into reading order.

        Raises ValueError for a wrong number of rows.
        """
        if len(whole) != len(self.orders):
            raise ValueError(
                f"the tensor has {len(whole)} rows, and lay_out_batch was given the documents of {len(self.orders)}; "
                f"give lay_out_batch all rows, without rows="
            )
        back = self.places(whole.device).argsort(1)
        return whole[torch.arange(len(whole), device=whole.device).unsqueeze(1), back]

    def exchange(self, members: Sequence[int], part: int, window: int | None, device: torch.device) -> KeyExchange:
        """The exchange of keys for the rank with shard `part`; made once, then returned from a cache.

        members, window: as for `exchange_of`. device: of the exchange's tensors.
        """
        longest = max((max(each, default=0) for each in self.lengths), default=0)
        window = None if window is None or window >= longest else window
        on_host = tuple(members), part, window
        if on_host not in self._exchanges:
            self._exchanges[on_host] = exchange_of(self.orders, self.lengths, members, part, window)
        if (*on_host, device) not in self._exchanges:
            self._exchanges[*on_host, device] = self._exchanges[on_host].to(device)
        return self._exchanges[*on_host, device]


def _document_lengths(ids: Tensor, row: int = 0) -> tuple[int, ...]:
    """The lengths of a row's documents, the stretches of equal ids. ids: [T] on the CPU.

    row: the row's number, for the error.
    Raises ValueError for a document that comes back after its end.
    """
    found, counts = torch.unique_consecutive(ids, return_counts=True)
    if len(found.unique()) < len(found):
        _refuse(found.tolist(), counts.tolist(), row)
    return tuple(counts.tolist())


def _refuse(found: Sequence[int], counts: Sequence[int], row: int) -> None:
    ended: dict[int, int] = {}
    token = 0
    for document, count in zip(found, counts, strict=True):
        if document in ended:
            raise ValueError(
                f"documents: document {document} of row {row} ended before token {ended[document]} and comes back at "
                f"token {token}; give each stretch of tokens its own number"
            )
        token += count
        ended[document] = token
