"""The options of one call of attention, and from these: the keys each query sees, and the weights dropout drops.

`Visible` has the keys in two forms: ranges for kernels and plain torch, and calls of torch's attention. `Drop` has the
index of each weight, from which `weft.kernels.dropout` draws.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from weft.mesh import derive_key

from ..dispatch.backend import can_read, has_data, is_recorded
from ..dispatch.token_order import Runs, as_read
from ..dropout.function import number_of, quantized
from ..random.philox import Part
from . import stretches
from .ranges import Ranges, check_bounds, document_bounds, explicit_ranges, keys_seen, ranges_from_keys, ranges_of


class Visible(Protocol):
    """The keys each query sees. Each form is computed when first read."""

    @property
    def ranges(self) -> Ranges:
        """The ranges, on the device of the queries."""

    def fused_calls(self, dtype: torch.dtype) -> stretches.FusedCalls:
        """The calls of torch's fused attention for CPUs. dtype: of the queries. Reads values on the host at first."""


class VisibleKeys:
    """A `Visible` of given ranges. Both forms are kept, for all layers of a model."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._fused_calls: dict[torch.dtype, stretches.FusedCalls] = {}

    @classmethod
    def of(cls, keys: Tensor, count: int) -> VisibleKeys:
        """Make a `VisibleKeys` for `count` keys.

        keys: int32 [queries, 2], the first key each query sees, and the key after the last.
        """
        return cls(ranges_from_keys(keys.unsqueeze(0), count))

    def to(self, device: torch.device) -> VisibleKeys:
        """A copy with the ranges on `device`."""
        return VisibleKeys(Ranges(*(each.to(device) for each in self.ranges)))

    def fused_calls(self, dtype: torch.dtype) -> stretches.FusedCalls:
        """The calls of torch's fused attention for CPUs; see `Visible.fused_calls`."""
        if dtype not in self._fused_calls:
            T, S = (each.shape[1] for each in self.ranges)
            self._fused_calls[dtype] = stretches.fused_calls_of(self.ranges.keys, T, S, True, dtype)
        return self._fused_calls[dtype]


class Drop(NamedTuple):
    """Dropout of the weights [B, heads, T, S], each named by its index among the global weights [..., heads, T, S].

    Weight (b, h, i, j) has the index offsets[b] + h * head_stride + query_place * row_stride + key_place. It is dropped
    where the 16 bits that `weft.kernels.dropout` draws for this index are below the threshold, and otherwise
    multiplied by the scale.
    """

    key: int  # 64 bits
    threshold: int
    scale: float
    offsets: Tensor  # int64 [B]
    head_stride: int
    row_stride: int
    query_places: Tensor | None = None  # int32 [B or 1, T]; None for first_query + i
    key_places: Tensor | None = None  # int32 [B or 1, S]; None for first_key + j
    first_query: int = 0
    first_key: int = 0


def drop_of(p: float, key: int, name: str | None, part: Part, places: Tensor | None, device: torch.device) -> Drop:
    """The `Drop` of a call whose weights are in `part`, a box [..., heads, T, S] of the global weights.

    p, key, name: as in `weft.kernels.dropout`.
    places: int32 [1, T], the row in `part` of each query. None: query i has row i.
    """
    offsets = torch.full((1,), part.offset, dtype=torch.int64, device=device)
    for size, stride in zip(part.sizes[:-3], part.strides[:-3], strict=True):
        offsets = (offsets.unsqueeze(1) + torch.arange(size, device=device) * stride).flatten()
    threshold, scale = quantized(p)
    number = key if name is None else derive_key(key, name)
    head_stride, row_stride = part.strides[-3:-1]
    return Drop(number, threshold, scale, offsets, head_stride, row_stride, places)


# Query, key, value, documents, dropout key and sinks.
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Scores(NamedTuple):
    """How the score of a query and a key is computed."""

    head_dim: int
    scale: float  # the factor of query @ key.T
    softcap: float | None = None  # a score x becomes softcap * tanh(x / softcap)


class AttentionOptions(NamedTuple):
    """The options of one call of attention on local tensors. From `first` on, a rank's part of the call."""

    head_dim: int
    causal: bool = True  # a query sees the keys up to its own token's
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    window: int | None = None  # with causal, a query sees at most the last `window` of these keys
    softcap: float | None = None
    dropout: float = 0.0  # the share of attention weights set to zero
    number: int = 0  # the dropout key as an int; not read where the call has a tensor for the dropout key
    name: str | None = None  # combined with the dropout key as in `dropout.function`
    first: int | None = None  # the index of the key at query 0's token; None: S - T, the queries are the last T tokens
    order: Runs | None = None  # the order in memory of key, value and documents; None: the sequence's order
    queries: Runs | None = None  # the order in memory of the queries; None: `order`
    # Where the weights of this call are among the global weights [..., heads, T, S], for dropout; None: the call has
    # all weights. With `order`, rows and columns are in the sequence's order, and `part` has the rows of all queries.
    part: Part | None = None

    @property
    def runs(self) -> Runs | None:
        """The order in memory of the queries; None: the sequence's order."""
        return self.order if self.queries is None else self.queries

    @property
    def scores(self) -> Scores:
        """How scores are computed."""
        return Scores(self.head_dim, self.head_dim**-0.5 if self.scale is None else self.scale, self.softcap)


class VisibleInCall:
    """The `Visible` of one call of attention, for queries in the sequence's order. Each form is computed when read.

    ranges: the ranges, where the caller already has them.
    """

    def __init__(self, operands: Operands, options: AttentionOptions, ranges: Ranges | None = None) -> None:
        self._operands, self._options, self.known_ranges = operands, options, ranges

    @property
    def ranges(self) -> Ranges:
        if self.known_ranges is None:
            self.known_ranges = _ranges_for(self._operands, self._options)
        return self.known_ranges

    def fused_calls(self, dtype: torch.dtype) -> stretches.FusedCalls:
        return fused_calls_for(self._operands, self._options)


def _ranges_for(operands: Operands, options: AttentionOptions) -> Ranges:
    """The ranges of a call, for queries in the sequence's order. Cached for calls without documents."""
    query, key, _, documents, *_ = operands
    T, S, causal, window, device = query.shape[-2], key.shape[-2], options.causal, options.window, query.device
    bounds = _bounds(documents, query.ndim, options.order)
    if options.runs is None:
        first = S - T if options.first is None else options.first
        return explicit_ranges(T, S, first, causal, window, bounds, device)
    if bounds is None and has_data(query) and not is_recorded(query):
        return _cached_in_order(options.runs, S, causal, window, device)
    return _in_order(options.runs, S, causal, window, bounds, device)


def fused_calls_for(operands: Operands, options: AttentionOptions) -> stretches.FusedCalls:
    """The calls of torch's fused attention which together compute the op on a CPU. Cached by the arguments' values.

    All layers of a model have the same documents: the first layer's forward fills the cache for all layers.
    """
    query, key, _, documents, *_ = operands
    given = None if documents is None else (documents.numpy().tobytes(), tuple(documents.shape), documents.dtype)
    first = key.shape[-2] - query.shape[-2] if options.first is None else options.first
    return _cached_fused_calls(
        query.shape[-2], key.shape[-2], first, options.causal, options.window, options.runs, options.order,
        given, query.ndim, query.dtype,
    )  # fmt: skip


def drop_for(operands: Operands, options: AttentionOptions) -> Drop | None:
    """Dropout of a call's weights, for queries in the sequence's order; None without dropout."""
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
    """The bounds of the keys' documents, keys in the sequence's order: int32 [..., S, 2].

    documents: ids or bounds, in the memory order `order`. dims: the query's number of dims, which bounds have too.
    """
    if documents is None:
        return None
    if order is not None:
        documents = as_read(documents, order, dims - 2)
    if documents.ndim != dims:
        return document_bounds(documents)
    if documents.numel() and can_read(documents):
        check_bounds(documents)
    return documents


@lru_cache(maxsize=16)
def _cached_fused_calls(
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
) -> stretches.FusedCalls:
    """See `fused_calls_for`. given: bytes, shape and dtype of the documents. dims, dtype: of the query."""
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
        return stretches.fused_calls_of(seen, T, S, causal, dtype)


def _in_order(
    runs: Runs, S: int, causal: bool, window: int | None, bounds: Tensor | None, device: torch.device
) -> Ranges:
    """The ranges of queries at the tokens of `runs`, in the sequence's order."""
    return ranges_from_keys(keys_seen(_places(runs, device), S, causal, window, bounds), S)


@lru_cache(maxsize=32)
def _cached_in_order(runs: Runs, S: int, causal: bool, window: int | None, device: torch.device) -> Ranges:
    with torch.inference_mode(False):
        return _in_order(runs, S, causal, window, None, device)


def _places(runs: Runs, device: torch.device) -> Tensor:
    """The tokens of the runs, ascending: int32 [T]."""
    return torch.cat([torch.arange(*run, dtype=torch.int32, device=device) for run in sorted(runs)])
