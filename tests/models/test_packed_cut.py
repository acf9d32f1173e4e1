"""The cut of a packed row over the context ranks, and the keys that ranks exchange, against every pair of tokens."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor
from weft.kernels.extension import Runs
from weft.mesh.extension import chunk
from weft.models.parallel.packed.exchange import exchange_of, key_messages, shards_of
from weft.models.parallel.packed.order import balanced_order, order_by_documents

MIXTURES = {
    "even": lambda draw: draw.randint(16, 8192),
    "as-many-of-each-size": lambda draw: int(16 * 512 ** draw.random()),
    "short": lambda draw: 16 + int(draw.expovariate(1 / 500)),
    "middling": lambda draw: 16 + int(draw.expovariate(1 / 2000)),
    "few-long-among-short": lambda draw: 8192 if draw.random() < 0.015 else 16,
    "some-long-among-short": lambda draw: 8192 if draw.random() < 0.125 else 64,
    "all-500": lambda draw: 500,
    "all-5000": lambda draw: 5000,
    "all-8192": lambda draw: 8192,
    "long": lambda draw: draw.randint(4000, 8192),
    "heavy-tailed": lambda draw: min(8192, int(16 * draw.paretovariate(0.7))),
}


def documents(mixture: str, tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths of documents of at most 8,192 tokens that fill a row, in random order."""
    draw, lengths, left = Random(seed), [], tokens
    while left:
        lengths.append(min(left, MIXTURES[mixture](draw), 8192))
        left -= lengths[-1]
    draw.shuffle(lengths)
    return tuple(lengths)


def small(seed: int) -> tuple[int, ...]:
    """A few documents of a few tokens each."""
    draw = Random(seed)
    return tuple(draw.choice([1, 2, 3, draw.randint(1, 60)]) for _ in range(draw.randint(1, 12)))


def first_seen(lengths: tuple[int, ...], window: int | None) -> Tensor:
    """[T]: the first key that each query sees, by its document and window; the last one is the query's own."""
    places = torch.arange(sum(lengths))
    first = torch.cat([torch.full((n,), sum(lengths[:i]), dtype=torch.int64) for i, n in enumerate(lengths)])
    return first if window is None else torch.maximum(first, places - window + 1)


def seen(lengths: tuple[int, ...], window: int | None) -> Tensor:
    """bool [T, T]: which keys each query sees."""
    key = torch.arange(sum(lengths))
    return (first_seen(lengths, window)[:, None] <= key) & (key <= key[:, None])


def owners(order: Runs, parts: int) -> Tensor:
    """[T]: the shard of each token of the row, by its place in the order."""
    lying = torch.cat([torch.arange(start, stop) for start, stop in order])
    owner = torch.empty_like(lying)
    for part in range(parts):
        owner[lying[slice(*chunk(len(lying), parts, part))]] = part
    return owner


def busiest(lengths: tuple[int, ...], parts: int, windows: tuple[int | None, ...] = (None,)) -> float:
    """Work of the busiest shard over the mean: the number of keys that the shard's queries see, in all layers."""
    sees = sum(torch.arange(sum(lengths)) - first_seen(lengths, window) + 1 for window in windows)
    work = torch.bincount(owners(order_by_documents(lengths, parts, windows), parts), sees, minlength=parts)
    return float(work.max() / work.mean())


@pytest.mark.parametrize("tokens", [32768, 49999, 131072])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_busiest_of_8_ranks_has_at_most_1_05_of_the_mean_work(mixture: str, tokens: int) -> None:
    for seed in range(3):
        assert busiest(documents(mixture, tokens, seed), 8) <= 1.05


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param((16,), id="16"),
        pytest.param((512,), id="512"),
        pytest.param((4096,), id="4096"),
        pytest.param((None, 1024, 1024, 1024), id="three-of-four-layers"),
        pytest.param((128, 2048, None), id="three-kinds"),
    ],
)
@pytest.mark.parametrize("mixture", [*MIXTURES, "one-document"])
def test_the_work_of_windows_is_even_over_8_ranks(mixture: str, windows: tuple[int | None, ...]) -> None:
    for seed in range(2):
        lengths = (49999 + seed,) if mixture == "one-document" else documents(mixture, 32768, seed)
        assert busiest(lengths, 8, windows) <= 1.05


@pytest.mark.few(2)
@pytest.mark.parametrize("parts", [2, 3, 4, 16, 32])
def test_the_work_is_even_over_fewer_and_more_ranks(parts: int) -> None:
    for mixture in MIXTURES:
        assert busiest(documents(mixture, 65536, 5), parts) <= 1.05


@pytest.mark.parametrize("seed", range(5))
def test_the_work_is_nearly_even_in_a_short_row(seed: int) -> None:
    draw = Random(seed)
    lengths = tuple(draw.randint(1, 128) for _ in range(40))
    assert busiest(lengths, 4) <= 1.05


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_on_one_rank_and_runs_ascend(seed: int, parts: int) -> None:
    lengths = small(seed)
    order = order_by_documents(lengths, parts)
    assert order == order_by_documents.__wrapped__(lengths, parts)
    assert sorted(token for run in order for token in range(*run)) == list(range(sum(lengths)))
    for part, runs in enumerate(shards_of(order, parts)):
        assert sum(stop - start for start, stop in runs) == -int.__sub__(*chunk(sum(lengths), parts, part))
        assert all(before[1] < after[0] for before, after in pairwise(runs))


def test_a_single_document_gets_the_balanced_order() -> None:
    assert order_by_documents((1000,), 8) == balanced_order(1000, 8) == order_by_documents((1000,), 8, (1000, None))


def test_short_documents_stay_whole() -> None:
    lengths = documents("short", 131072, 1)
    pairs = key_messages(order_by_documents(lengths, 8), lengths, 8)
    received = sum(stop - start for runs in pairs.values() for start, stop in runs)
    assert received < 0.01 * 7 * 131072  # of what an all-gather receives; documents of 300 tokens are cut 7 times
    assert key_messages(order_by_documents((16,) * 1024, 8), (16,) * 1024, 8) == {}


def test_documents_that_fill_the_ranks_are_not_cut() -> None:
    assert key_messages(order_by_documents((4096,) * 8, 8), (4096,) * 8, 8) == {}


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_receives_what_its_queries_see_and_it_does_not_hold(seed: int, parts: int, window: int | None) -> None:
    lengths = small(seed)
    sees = seen(lengths, window)
    for order in (order_by_documents(lengths, parts), balanced_order(sum(lengths), parts)):
        owner, pairs = owners(order, parts), key_messages(order, lengths, parts, window)
        for source in range(parts):
            for destination in range(parts):
                needed = sees[owner == destination].any(0) & (owner == source) & (source != destination)
                runs = pairs.get((source, destination), ())
                assert [token for run in runs for token in range(*run)] == needed.nonzero().flatten().tolist()
                assert all(before[1] < after[0] for before, after in pairwise(runs))


@pytest.mark.parametrize("number", range(20))
def test_received_keys_are_at_the_lower_bound_in_twenty_mixtures(number: int) -> None:
    mixture, window = [*MIXTURES][number % len(MIXTURES)], (None, 1024)[number % 2]
    lengths = tuple(-(-length // 16) for length in documents(mixture, 32768, number))  # pairs of 2,048 tokens
    order = order_by_documents(lengths, 8)
    owner, sees = owners(order, 8), seen(lengths, None if window is None else window // 16)
    bound = sum(int((sees[owner == rank].any(0) & (owner != rank)).sum()) for rank in range(8))
    pairs = key_messages(order, lengths, 8, None if window is None else window // 16)
    assert sum(stop - start for runs in pairs.values() for start, stop in runs) == bound


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_a_query_sees_its_keys_among_the_own_and_the_received(seed: int, parts: int, window: int | None) -> None:
    draw, tokens = Random(seed), 64
    rows = []
    for _ in range(2):
        lengths = small(draw.randint(0, 1000))
        while sum(lengths) < tokens:
            lengths += (min(tokens - sum(lengths), draw.randint(1, 30)),)
        rows.append((*lengths[:-1], lengths[-1]) if sum(lengths) == tokens else (tokens - 3, 3))
    orders = [order_by_documents(lengths, parts) for lengths in rows]
    exchanges = [exchange_of(orders, rows, range(parts), part, window) for part in range(parts)]
    # the keys of a row's token are the number 1000 * row + token
    held = [
        torch.cat([1000 * row + torch.tensor([token for run in shards_of(order, parts)[part] for token in range(*run)])
                   for row, order in enumerate(orders)])
        for part in range(parts)
    ]  # fmt: skip
    outgoing = [held[part][each.sent].split(each.sent_counts) for part, each in enumerate(exchanges)]
    for part, each in enumerate(exchanges):
        arrived = torch.cat([outgoing[other][part] for other in range(parts)])
        assert [len(outgoing[other][part]) for other in range(parts)] == list(each.received_counts)
        received = arrived[each.arrangement]
        assert received.tolist() == sorted(received.tolist())
        others = torch.zeros(len(held[part]), 2, dtype=torch.int32)
        others[each.queries] = each.received.ranges.keys[0]
        for query, (own, other) in enumerate(zip(each.own.ranges.keys[0].tolist(), others.tolist(), strict=True)):
            row, token = divmod(int(held[part][query]), 1000)
            keys = sorted(held[part][slice(*own)].tolist() + received[slice(*other)].tolist())
            expected = seen(rows[row], window)[token].nonzero().flatten()
            assert keys == (1000 * row + expected).tolist()
