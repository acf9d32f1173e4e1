"""Ranges of attention against masks of T x S, written from the words of the options."""

from __future__ import annotations

import random
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from weft.kernels.attention.ranges import (
    Ranges,
    document_bounds,
    explicit_ranges,
    keys_seen,
    ranges_from_keys,
    ranges_of,
)

from tests.kernels.attention.dense import seen_by
from tests.kernels.reads import NoReads

CPU = torch.device("cpu")
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0], [9, -4, 3, 3, 3, 3, 5]])
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-above-all": {"window": 99},
    "documents": {"documents": PACKED},
    "documents-not-causal": {"documents": PACKED, "causal": False},
    "window-and-documents": {"documents": PACKED, "window": 2},
}


def mask_of(ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Who sees whom by the ranges of the queries, and by those of the keys: bool [B, T, S] each."""
    (_, T, _), S = ranges.keys.shape, ranges.queries.shape[1]
    key, query = torch.arange(S), torch.arange(T)
    starts, stops = ranges.keys.unsqueeze(2).unbind(-1)
    first, last = ranges.queries.unsqueeze(1).unbind(-1)
    return (starts <= key) & (key < stops), (first <= query[:, None]) & (query[:, None] < last)


def assert_sees(ranges: Ranges, seen: Tensor) -> None:
    for side in ranges:
        assert side.dtype == torch.int32
        assert side.numel() == 0 or (side.diff(dim=1) >= 0).all()
        assert (side[..., 0] <= side[..., 1]).all()
    for mask in mask_of(ranges):
        assert torch.equal(mask, seen.expand_as(mask) if len(mask) > 1 else seen)


def keys_among(keys: Tensor, held: Tensor) -> Tensor:
    """`Ranges.keys` for a selection of the keys, counted from 0. held: the selected keys, int32, ascending."""
    return torch.searchsorted(held, keys, out_int32=True)


@pytest.mark.parametrize("T", [7, 4, 1, 0], ids=["as-many-queries", "fewer-queries", "one-query", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_query_sees_the_right_keys(name: str, T: int) -> None:
    options = OPTIONS[name]
    documents = options.get("documents")
    bounds = None if documents is None else document_bounds(documents)
    ranges = explicit_ranges(T, 7, 7 - T, options.get("causal", True), options.get("window"), bounds, CPU)
    assert_sees(ranges, seen_by(T, 7, **options))


@pytest.mark.parametrize("first", [-3, 2, 9])
@pytest.mark.parametrize("name", OPTIONS)
def test_queries_of_other_tokens_than_the_last(name: str, first: int) -> None:
    """A query before the keys, or behind them, has no document among them."""
    options = OPTIONS[name]
    documents = options.get("documents")
    bounds = None if documents is None else document_bounds(documents)
    ranges = explicit_ranges(4, 7, first, options.get("causal", True), options.get("window"), bounds, CPU)
    places = [*range(first, first + 4)]
    inside = torch.tensor([documents is None or 0 <= place < 7 for place in places])
    options = dict(options)
    if documents is not None:
        places = [min(max(place, 0), 6) for place in places]
    assert_sees(ranges, seen_by(4, 7, places=places, **options) & inside[:, None])


@pytest.mark.parametrize(
    ("T", "S", "first", "causal", "window", "plain"),
    [
        pytest.param(5, 5, 0, True, None, True, id="triangle"),
        pytest.param(5, 5, 0, True, 5, True, id="triangle-within-the-window"),
        pytest.param(5, 5, 0, True, 4, False, id="band"),
        pytest.param(3, 5, 2, True, None, False, id="prefix-and-triangle"),
        pytest.param(1, 5, 4, True, None, True, id="last-query"),
        pytest.param(1, 5, 4, True, 4, False, id="last-query-in-a-window"),
        pytest.param(3, 5, 2, False, None, True, id="full"),
        pytest.param(5, 5, 4, True, None, False, id="as-many-queries-behind-the-keys"),
    ],
)
def test_plain_ranges_are_none(T: int, S: int, first: int, causal: bool, window: int | None, plain: bool) -> None:
    ranges = ranges_of(T, S, first, causal, window, None, CPU)
    assert (ranges is None) == plain
    seen = torch.ones(T, S, dtype=torch.bool).tril() if causal and T == S else torch.ones(T, S, dtype=torch.bool)
    explicit = explicit_ranges(T, S, first, causal, window, None, CPU)
    assert torch.equal(mask_of(explicit)[0][0], seen) == plain


@pytest.mark.parametrize(
    ("ids", "bounds"),
    [
        pytest.param([], [], id="no-tokens"),
        pytest.param([4], [[0, 1]], id="one-token"),
        pytest.param([7, 7, 2, 3, 3], [[0, 2], [0, 2], [2, 3], [3, 5], [3, 5]], id="three-documents"),
    ],
)
def test_bounds(ids: list[int], bounds: list[list[int]]) -> None:
    found = document_bounds(torch.tensor(ids, dtype=torch.int64))
    assert found.dtype == torch.int32
    assert found.tolist() == bounds


def test_bounds_of_random_rows() -> None:
    generator = random.Random(1)
    for _ in range(20):
        lengths = [[generator.randint(1, 4) for _ in range(20)] for _ in range(6)]
        rows = [[number for number, length in enumerate(row) for _ in range(length)][:11] for row in lengths]
        ids = torch.tensor(rows, dtype=torch.int32).view(2, 3, 11)
        starts, stops = document_bounds(ids).unsqueeze(3).unbind(-1)
        token = torch.arange(11)
        assert torch.equal((starts <= token) & (token < stops), ids.unsqueeze(3) == ids.unsqueeze(2))


def test_a_document_that_comes_back_is_refused() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 2], [5, 5, 3, 5, 5]])
    with pytest.raises(ValueError, match="document 5 of row 1 ended before token 2 and comes back at token 3"):
        document_bounds(ids)


@pytest.mark.parametrize(("causal", "window", "packed"), [*product([True], [None, 2], [False, True])])
def test_runs_of_queries_with_the_keys_that_they_see(causal: bool, window: int | None, packed: bool) -> None:
    runs = [1, 2, 5, 6]
    bounds = document_bounds(PACKED[2:]) if packed else None
    documents = PACKED[2:] if packed else None
    keys = keys_seen(torch.tensor(runs, dtype=torch.int32), 7, causal, window, bounds)
    wanted = seen_by(4, 7, places=runs, causal=causal, window=window, documents=documents)
    assert_sees(ranges_from_keys(keys, 7), wanted)
    held = wanted.any(1)[0].nonzero()[:, 0]
    compacted = ranges_from_keys(keys_among(keys, held.int()), len(held))
    assert_sees(compacted, wanted[..., held])


def test_nothing_is_read_on_the_host() -> None:
    with patch("weft.kernels.attention.ranges.can_read", lambda tensor: False), NoReads():
        bounds = document_bounds(PACKED)
        explicit_ranges(4, 7, 3, True, 2, bounds, CPU)
        explicit_ranges(4, 7, 3, True, 2, None, CPU)


def test_ranges_without_documents_are_made_once() -> None:
    first, later = (explicit_ranges(3, 5, 2, True, 2, None, CPU) for _ in range(2))
    assert first is later
    with torch.inference_mode():
        inferred = explicit_ranges(3, 6, 3, True, 2, None, CPU)
    assert not inferred.keys.is_inference()


def test_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = explicit_ranges(3, 5, 2, True, 3, None, CPU)
    with FakeTensorMode():
        fake = explicit_ranges(3, 5, 2, True, 3, None, CPU)
    assert type(fake.keys) is not Tensor and fake.keys.shape == real.keys.shape
    assert explicit_ranges(3, 5, 2, True, 3, None, CPU) is real
    meta = explicit_ranges(3, 5, 2, True, None, document_bounds(PACKED[:, :5].to("meta")), torch.device("meta"))
    assert meta.keys.shape == (3, 3, 2) and meta.queries.shape == (3, 5, 2)
