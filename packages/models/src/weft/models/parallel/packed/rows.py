"""`RowOrders`: how each row of a packed batch is laid out over the context ranks, by the documents of the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from weft.kernels.extension import Runs

from .exchange import KeyExchange, exchange_of, tokens_of
from .order import NO_WINDOW, Windows, order_by_documents

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
