"""The options of one call of attention, and what follows from them: who sees whom, and which weights are dropped."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch.backend import has_data, is_recorded
from ..dispatch.token_order import Runs, as_read
from ..dropout.function import number_of
from ..random.part import Part
from . import stretches
from .drop import Drop, drop_of
from .ranges import Ranges, document_bounds, explicit_ranges, keys_seen, ranges_from_keys, ranges_of

# Query, key, value, documents, dropout key and sinks.
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Scores(NamedTuple):
    """How the score of a query and a key is computed."""

    head_dim: int
    scale: float  # the factor of query @ key.T
    softcap: float | None = None  # a score x becomes softcap * tanh(x / softcap)


class Options(NamedTuple):
    """The options of one call of attention, and what a rank computes of it."""

    head_dim: int
    causal: bool = True  # a query sees the keys up to its own token's
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    window: int | None = None  # with causal, a query sees at most the last `window` of these keys
    softcap: float | None = None
    dropout: float = 0.0  # the share of attention weights set to zero
    number: int = 0  # the key of dropout, where no tensor is given
    name: str | None = None  # combined with the key as in `dropout.function`
    first: int | None = None  # the key with the same token as query 0; None: S - T, the last query's is the last key's
    order: Runs | None = None  # the stored order of key, value and documents, as runs of the sequence
    queries: Runs | None = None  # with `order`, the runs of the queries; None: all of `order`
    # The box of the global weights [..., heads, T, S] to which these queries belong; None: all. With `order`, rows and
    # columns are in the sequence's order, and the box has all rows.
    part: Part | None = None

    @property
    def runs(self) -> Runs | None:
        """The stored order of the queries, as runs of the sequence."""
        return self.order if self.queries is None else self.queries

    @property
    def scores(self) -> Scores:
        """How scores are computed."""
        return Scores(self.head_dim, self.head_dim**-0.5 if self.scale is None else self.scale, self.softcap)


def visible_for(operands: Operands, options: Options, ranges: Ranges | None = None) -> VisibleToCall:
    """Which keys the queries see, with the queries in the sequence's order. ranges: where they are known."""
    return VisibleToCall(operands, options, ranges)


class VisibleToCall:
    """`Visible` of one call of attention. Found where it is read, and cached by the arguments."""

    def __init__(self, operands: Operands, options: Options, ranges: Ranges | None) -> None:
        self._operands, self._options, self.known_ranges = operands, options, ranges

    @property
    def ranges(self) -> Ranges:
        if self.known_ranges is None:
            self.known_ranges = ranges_for(self._operands, self._options)
        return self.known_ranges

    def batch(self, dtype: torch.dtype) -> stretches.Batch:
        return batch_for(self._operands, self._options)


def ranges_for(operands: Operands, options: Options) -> Ranges:
    """Who sees whom, with the queries in the sequence's order. Cached without documents."""
    query, key, _, documents, *_ = operands
    T, S, causal, window, device = query.shape[-2], key.shape[-2], options.causal, options.window, query.device
    bounds = _bounds(documents, query.ndim, options.order)
    if options.runs is None:
        first = S - T if options.first is None else options.first
        return explicit_ranges(T, S, first, causal, window, bounds, device)
    if bounds is None and has_data(query) and not is_recorded(query):
        return _cached_in_order(options.runs, S, causal, window, device)
    return _in_order(options.runs, S, causal, window, bounds, device)


def batch_for(operands: Operands, options: Options) -> stretches.Batch:
    """The calls of torch's fused attention on a CPU, which read who sees whom on the host. Cached by their arguments.

    The layers of a model have the same documents, so one of them plans for all, and for their backward.
    """
    query, key, _, documents, *_ = operands
    given = None if documents is None else (documents.numpy().tobytes(), tuple(documents.shape), documents.dtype)
    first = key.shape[-2] - query.shape[-2] if options.first is None else options.first
    return _cached_batch(
        query.shape[-2], key.shape[-2], first, options.causal, options.window, options.runs, options.order,
        given, query.ndim, query.dtype,
    )  # fmt: skip


def drop_for(operands: Operands, options: Options) -> Drop | None:
    """Dropout of this call's weights, with the queries in the sequence's order; None without dropout."""
    if not options.dropout:
        return None
    query, key, _, _, dropout_key, _ = operands
    part, places = options.part, None
    if part is None:
        rows = query.shape[-2] if options.order is None else key.shape[-2]
        part = Part.of((*query.shape[:-2], query.shape[-1] // options.head_dim, rows, key.shape[-2]))
    if options.runs is not None:
        places = _places(options.runs, query.device).unsqueeze(0)
    number = options.number if dropout_key is None else number_of(dropout_key)
    return drop_of(options.dropout, number, options.name, part, places, query.device)


def _bounds(documents: Tensor | None, dims: int, order: Runs | None) -> Tensor | None:
    """The bounds of the keys' documents in the sequence's order, int32 [..., S, 2], from ids or bounds.

    dims: of the query; bounds have as many.
    """
    if documents is None:
        return None
    if order is not None:
        documents = as_read(documents, order, dims - 2)
    return documents if documents.ndim == dims else document_bounds(documents)


@lru_cache(maxsize=16)
def _cached_batch(
    T: int,
    S: int,
    first: int,
    causal: bool,
    window: int | None,
    runs: Runs | None,
    order: Runs | None,
    given: tuple[bytes, tuple[int, ...], torch.dtype] | None,
    dims: int,
    dtype: torch.dtype,
) -> stretches.Batch:
    """`batch_for`. given: the documents' memory, shape and dtype. dims, dtype: of the query."""
    device = torch.device("cpu")
    bounds = None
    with torch.inference_mode(False):  # an inference tensor could not be used in a later call's backward
        if given is not None:
            memory, shape, of_ids = given
            bounds = _bounds(torch.frombuffer(bytearray(memory), dtype=of_ids).view(shape), dims, order)
        if runs is not None or bounds is not None:
            places = _places(((first, first + T),) if runs is None else runs, device)
            seen: Tensor | None = keys_seen(places, S, causal, window, bounds)
        else:
            ranges = ranges_of(T, S, first, causal, window, None, device)
            seen = None if ranges is None else ranges.keys
        return stretches.batch_of(seen, T, S, causal, dtype)


def _in_order(
    runs: Runs, S: int, causal: bool, window: int | None, bounds: Tensor | None, device: torch.device
) -> Ranges:
    return ranges_from_keys(keys_seen(_places(runs, device), S, causal, window, bounds), S)


@lru_cache(maxsize=32)
def _cached_in_order(runs: Runs, S: int, causal: bool, window: int | None, device: torch.device) -> Ranges:
    with torch.inference_mode(False):
        return _in_order(runs, S, causal, window, None, device)


def _places(runs: Runs, device: torch.device) -> Tensor:
    """The tokens of the runs, ascending: int32 [T]."""
    return torch.cat([torch.arange(*run, dtype=torch.int32, device=device) for run in sorted(runs)])
