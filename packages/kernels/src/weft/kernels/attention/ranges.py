"""Ranges: which keys each query sees, as two numbers a query, and which queries see each key, as two numbers a key.

A document is a contiguous stretch of a row. So under causality, windows, documents, a cache, and any ascending
selection of queries and keys, query i sees exactly the keys starts[i] <= j < stops[i], and neither number decreases
with i. The queries which see key j are then an interval too. Attention computes from these intervals alone.

All functions are torch ops on the tensors' device. None waits for a device: checks read CPU tensors only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch.backend import can_read, has_data, is_compiling, is_recorded


class Ranges(NamedTuple):
    """The keys each query sees, and the queries which see each key. A batch of 1 stands for all rows of a batch."""

    keys: Tensor  # int32 [B or 1, T, 2]: the first key each query sees, and the key after the last
    queries: Tensor  # int32 [B or 1, S, 2]: the first query which sees each key, and the query after the last


def document_bounds(documents: Tensor) -> Tensor:
    """The start and stop of each token's document: ids [..., S] -> int32 [..., S, 2]. See `sharded.document_bounds`."""
    S = documents.shape[-1]
    if documents.numel() and can_read(documents):
        _check_documents(documents)
    if not documents.numel():
        return torch.empty(*documents.shape, 2, dtype=torch.int32, device=documents.device)
    place = torch.arange(S, dtype=torch.int32, device=documents.device)
    changes = documents[..., 1:] != documents[..., :-1]  # whether token j + 1 begins a document
    begins = torch.where(changes, place[1:], 0)
    starts = torch.cat((torch.zeros_like(documents[..., :1], dtype=torch.int32), begins), -1).cummax(-1).values
    ends = torch.where(changes, place[1:], S)
    ends = torch.cat((ends, torch.full_like(documents[..., :1], S, dtype=torch.int32)), -1)
    return torch.stack((starts, ends.flip(-1).cummin(-1).values.flip(-1)), -1)


def ranges_of(
    T: int, S: int, first: int, causal: bool, window: int | None, bounds: Tensor | None, device: torch.device
) -> Ranges | None:
    """The ranges of T queries and S keys.

    first: the index of the key at query 0's token. window: None: all earlier keys. bounds: of the keys' documents, from
    `document_bounds`; None: a row is one document.
    Returns None for a plain call: if causal and T == S, a query sees the keys up to its own; otherwise every query
    sees every key.
    """
    if bounds is None and _is_plain(T, S, first, causal, window):
        return None
    return explicit_ranges(T, S, first, causal, window, bounds, device)


def explicit_ranges(
    T: int, S: int, first: int, causal: bool, window: int | None, bounds: Tensor | None, device: torch.device
) -> Ranges:
    """As `ranges_of`, but never None: plain calls get Ranges too. Ranges without documents come from a cache."""
    here = torch.empty(0, device=device)
    if bounds is not None or is_compiling() or not has_data(here) or is_recorded(here):
        return _make_ranges(T, S, first, causal, window, bounds, device)
    return _cached(T, S, first, causal, window, device)


def keys_seen(places: Tensor, S: int, causal: bool, window: int | None, bounds: Tensor | None) -> Tensor:
    """The keys each query sees, `Ranges.keys`: int32 [B or 1, T, 2].

    places: int32 [T], ascending: for each query, the index of the key at the same token.
    bounds: int32 [..., S, 2], of the keys' documents. With bounds, a query whose place is outside 0 to S - 1 sees
    nothing.
    """
    stops = (places + 1).clamp(0, S) if causal else torch.full_like(places, S)
    starts = torch.zeros_like(places) if window is None else (places - (window - 1)).clamp(0, S)
    starts, stops = starts.unsqueeze(0), stops.unsqueeze(0)
    if bounds is not None:
        if S:
            own = bounds.reshape(-1, S, 2).index_select(1, places.clamp(0, S - 1))  # [B, T, 2]
            inside = (places >= 0) & (places < S)
            starts = torch.where(inside, torch.maximum(starts, own[..., 0]), places.clamp(0, S))
            stops = torch.where(inside, torch.minimum(stops, own[..., 1]), starts)
        else:
            starts = stops = starts.new_zeros(bounds.shape[:-2].numel(), len(places))
    return torch.stack((torch.minimum(starts, stops), stops), -1)


def ranges_from_keys(keys: Tensor, S: int) -> Ranges:
    """Make `Ranges` from `Ranges.keys`. S: the number of keys."""
    starts, stops = (keys[..., each].contiguous() for each in (0, 1))
    key = torch.arange(S, dtype=torch.int32, device=keys.device).expand(len(keys), S).contiguous()
    # Both numbers ascend: key j is seen by the queries after the last with stops <= j, up to the last with starts <= j.
    queries = [torch.searchsorted(each, key, right=True, out_int32=True) for each in (stops, starts)]
    return Ranges(keys, torch.stack(queries, -1))


def _is_plain(T: int, S: int, first: int, causal: bool, window: int | None) -> bool:
    """Whether queries see the keys up to their own (causal, T == S, first == 0), or all queries see all keys."""
    within = window is None or window >= first + T  # the window reaches before the first key
    if not causal or not within:
        return within
    return first == 0 if T == S else first >= S - 1


def _make_ranges(
    T: int, S: int, first: int, causal: bool, window: int | None, bounds: Tensor | None, device: torch.device
) -> Ranges:
    places = torch.arange(first, first + T, dtype=torch.int32, device=device)
    return ranges_from_keys(keys_seen(places, S, causal, window, bounds), S)


@lru_cache(maxsize=32)
def _cached(T: int, S: int, first: int, causal: bool, window: int | None, device: torch.device) -> Ranges:
    with torch.inference_mode(False):  # an inference tensor could not be saved for a later call's backward
        return _make_ranges(T, S, first, causal, window, None, device)


def check_bounds(bounds: Tensor) -> None:
    """Raise ValueError for bounds that no `document_bounds` makes.

    bounds: [..., S, 2] on a CPU, of keys in reading order. Each token lies within its bounds, and neither bound
    decreases from token to token. A bound may pass S, since a call with a cache reads the first S tokens.
    """
    place = torch.arange(bounds.shape[-2], device=bounds.device)
    starts, stops = bounds.unbind(-1)
    bad = (starts < 0) | (starts > place) | (stops <= place)
    bad[..., 1:] |= (starts[..., 1:] < starts[..., :-1]) | (stops[..., 1:] < stops[..., :-1])
    if bad.any():
        *rows, token = bad.nonzero()[0].tolist()
        raise ValueError(
            f"documents: the bounds of token {token} of row {rows[-1] if rows else 0} are "
            f"{bounds[*rows, token].tolist()}, which no stretch of tokens has; make bounds with document_bounds(ids)"
        )


def _check_documents(documents: Tensor) -> None:
    """Raise ValueError unless each id of a row is one contiguous stretch."""
    ids = documents.reshape(-1, documents.shape[-1])
    stretches = (ids[:, 1:] != ids[:, :-1]).sum(-1)
    in_order = ids.sort(-1).values
    repeated = stretches != (in_order[:, 1:] != in_order[:, :-1]).sum(-1)
    if not repeated.any():
        return
    row = int(repeated.nonzero()[0])
    ended: dict[int, int] = {}
    previous = None
    for token, document in enumerate(ids[row].tolist()):
        if document != previous and document in ended:
            raise ValueError(
                f"documents: document {document} of row {row} ended before token {ended[document]} and comes back at "
                f"token {token}; give each stretch of tokens its own number"
            )
        ended[document] = token + 1
        previous = document
