"""Attention on a CPU: which calls of torch's fused attention compute a row, and that they compute every option."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import KeyValueCache, attention
from weft.kernels.attention import blocks, options, stretches
from weft.kernels.attention.ranges import document_bounds, keys_seen

from tests.kernels.attention.dense import Dropped, dense, seen_by
from tests.kernels.cases import normal, upstream_of


def numbers_of(lengths: list[int]) -> Tensor:
    """The id of each token's document."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def keys_of(T: int, S: int, lengths: list[int] | None = None, causal: bool = True, window: int | None = None) -> Tensor:
    bounds = None if lengths is None else document_bounds(numbers_of(lengths))
    places = torch.arange(S - T, S, dtype=torch.int32)
    return keys_seen(places, S, causal, window, bounds)[0]


def described(calls: list[stretches.FusedCall]) -> list[str]:
    """Each call as "queries x keys kind"."""
    kinds = {(False, False): "all", (True, False): "causal", (False, True): "mask"}
    return [
        f"{each.queries.start}:{each.queries.stop} x {each.keys.start}:{each.keys.stop} "
        f"{kinds[each.causal, each.mask is not None]}{' merged' * each.merges}"
        for each in calls
    ]


CALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "causal": ({"T": 9, "S": 9}, ["0:9 x 0:9 causal"]),
    "all-keys": ({"T": 3, "S": 9, "causal": False}, ["0:3 x 0:9 all"]),
    "last-queries": ({"T": 3, "S": 9}, ["0:3 x 0:6 all", "0:3 x 6:9 causal merged"]),
    "one-query": ({"T": 1, "S": 9}, ["0:1 x 0:9 all"]),
    "documents": ({"T": 9, "S": 9, "lengths": [4, 2, 3]}, ["0:4 x 0:4 causal", "4:6 x 4:6 causal", "6:9 x 6:9 causal"]),
    "documents-not-causal": (
        {"T": 9, "S": 9, "lengths": [4, 5], "causal": False},
        ["0:4 x 0:4 all", "4:9 x 4:9 all"],
    ),
    "one-token-then-more": ({"T": 6, "S": 6, "lengths": [1, 5]}, ["0:1 x 0:1 all", "1:6 x 1:6 causal"]),
    "more-then-one-token": ({"T": 6, "S": 6, "lengths": [5, 1]}, ["0:5 x 0:5 causal", "5:6 x 5:6 all"]),
    "documents-of-one-token": (
        {"T": 6, "S": 6, "lengths": [1] * 6},
        ["0:4 x 0:4 mask", "4:6 x 4:6 mask"],
    ),
    "within-documents": (
        {"T": 4, "S": 9, "lengths": [7, 2]},
        ["0:2 x 0:5 all", "0:2 x 5:7 causal merged", "2:4 x 7:9 causal"],
    ),
    "window": ({"T": 9, "S": 9, "window": 3}, ["0:3 x 0:3 causal", "3:7 x 1:7 mask", "7:9 x 5:9 mask"]),
    "window-of-one": ({"T": 5, "S": 5, "window": 1}, ["0:4 x 0:4 mask", "4:5 x 4:5 mask"]),
    "window-above-all": ({"T": 5, "S": 5, "window": 9}, ["0:5 x 0:5 causal"]),
    "window-in-documents": (
        {"T": 9, "S": 9, "window": 2, "lengths": [2, 3, 4]},
        ["0:2 x 0:2 causal", "2:4 x 2:4 causal", "4:5 x 3:5 all", "5:7 x 5:7 causal", "7:9 x 6:9 mask"],
    ),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of four queries, and no call for several stretches."""
    for name, number in {"LEAST_BLOCK": 4, "MOST_BLOCK": 4, "SMALL": 0}.items():
        monkeypatch.setattr(stretches, name, number)
    for name, number in {"LEAST": 2, "MOST": 4}.items():
        monkeypatch.setattr(blocks, name, number)
    options._cached_fused_calls.cache_clear()
    yield
    options._cached_fused_calls.cache_clear()


@pytest.mark.parametrize(("given", "expected"), CALLS.values(), ids=CALLS)
def test_fused_calls_of_a_row(given: dict[str, Any], expected: list[str], tiny: None) -> None:
    assert described(list(stretches.fused_calls_of_row(keys_of(**given), torch.float32))) == expected


def test_a_row_of_short_documents_is_a_few_calls() -> None:
    calls = list(stretches.fused_calls_of_row(keys_of(300, 300, [10] * 30), torch.float32))
    assert described(calls)[:2] == ["0:60 x 0:60 mask", "60:120 x 60:120 mask"]
    assert len(calls) == 5


def test_queries_that_see_nothing_are_in_no_call() -> None:
    keys = torch.tensor([[0, 0], [0, 0], [0, 1], [0, 2], [2, 2], [2, 2], [2, 4], [4, 4]])
    found = described(list(stretches.fused_calls_of_row(keys, torch.float32)))
    assert found == ["2:4 x 0:2 causal", "6:7 x 2:4 all"]


def scores(calls: list[stretches.FusedCall]) -> int:
    """The number of scores that the calls compute; half of a square where causal."""
    total = 0
    for each in calls:
        T, S = each.queries.stop - each.queries.start, each.keys.stop - each.keys.start
        total += T * (T + 1) // 2 if each.causal else T * S
    return total


@pytest.mark.parametrize(
    ("given", "most"),
    [
        pytest.param({"lengths": [500, 1, 700, 300, 547]}, 1.0, id="documents"),
        pytest.param({"lengths": [700, 1348], "causal": False}, 1.0, id="documents-not-causal"),
        pytest.param({"window": 256}, 1.25, id="window"),
        pytest.param({"window": 128, "lengths": [900, 1148]}, 1.5, id="window-in-documents"),
    ],
)
def test_few_scores_are_computed_that_no_query_sees(given: dict[str, Any], most: float) -> None:
    keys = keys_of(2048, 2048, **given)
    seen = int((keys[:, 1] - keys[:, 0]).sum())
    assert seen <= scores(list(stretches.fused_calls_of_row(keys, torch.float32))) <= most * seen


# Every option


B, T, S, HEADS, D = 2, 13, 19, 4, 5
SINGLE: dict[str, dict[str, Any]] = {
    "documents": {"documents": [[3, 1, 9, 6], [19]]},
    "documents-alike": {"documents": [[3, 10, 6]] * B},
    "window": {"window": 4},
    "not-causal": {"causal": False},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3, "dropout_key": 2**63 + 5},
    "scale": {"scale": 0.7},
    "last-queries": {"T": T},
    "one-query": {"T": 1},
    "one-key-head": {"kv_heads": 1},
    "every-key-head": {"kv_heads": HEADS},
    "order": {"order": ((12, 19), (0, 3), (3, 3), (7, 12), (3, 7))},
}
NOT_TOGETHER = (
    {"window", "not-causal"}, {"documents", "documents-alike"}, {"last-queries", "one-query"},
    {"one-key-head", "every-key-head"}, {"order", "last-queries"}, {"order", "one-query"},
)  # fmt: skip
PAIRS = {
    "-and-".join(names): {**SINGLE[names[0]], **SINGLE[names[1]]}
    for names in combinations(SINGLE, 2)
    if set(names) not in NOT_TOGETHER
}


class Asked:
    """One call of the op, and the same written out. Tensors lie in the order's order, where the options have one."""

    def __init__(self, given: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
        self.options = {name: each for name, each in given.items() if name not in ("T", "kv_heads", "sinks")}
        self.T, kv_heads = given.get("T", S), given.get("kv_heads", 2)
        self.tensors = [normal(B, self.T, HEADS * D), *(normal(B, S, kv_heads * D, seed=i) for i in (1, 2))]
        self.tensors += [normal(HEADS, seed=3)] * bool(given.get("sinks"))
        self.tensors = [x.to(dtype) for x in self.tensors]
        self.ids = None
        if "documents" in given:
            self.ids = torch.stack([numbers_of(each) for each in given["documents"]])
            self.options["documents"] = self.laid(self.ids)

    def laid(self, x: Tensor) -> Tensor:
        """x [B, tokens, ...] in the order of storage."""
        order = self.options.get("order")
        return x if order is None or x.ndim == 1 else torch.cat([x[:, start:stop] for start, stop in order], 1)

    def found(self) -> list[Tensor]:
        leaves = [self.laid(x).requires_grad_() for x in self.tensors]
        sinks = leaves[3] if len(leaves) > 3 else None
        output = attention(*leaves[:3], head_dim=D, sinks=sinks, **self.options)
        upstream = self.laid(upstream_of(output.shape)).to(output.dtype)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    def written_out(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in self.tensors]
        causal, window = self.options.get("causal", True), self.options.get("window")
        seen = seen_by(self.T, S, causal=causal, window=window, documents=self.ids)
        index = torch.arange(B * HEADS * self.T * S).view(B, HEADS, self.T, S)
        p = self.options.get("dropout")
        output, _ = dense(
            *leaves[:3], seen, head_dim=D, scale=self.options.get("scale"), softcap=self.options.get("softcap"),
            sinks=leaves[3] if len(leaves) > 3 else None,
            dropped=None if p is None else Dropped(p, self.options["dropout_key"], index),
        )  # fmt: skip
        gradients = torch.autograd.grad(output, leaves, upstream_of(output.shape).to(dtype))
        return [self.laid(x.detach()) for x in (output, *gradients)]


@pytest.mark.parametrize("blocks_of", ["few", "many"])
@pytest.mark.parametrize("given", (SINGLE | PAIRS).values(), ids=SINGLE | PAIRS)
def test_every_option_alone_and_in_pairs(given: dict[str, Any], blocks_of: str, request: Any) -> None:
    if blocks_of == "many":
        request.getfixturevalue("tiny")
    asked = Asked(given)
    for found, truth in zip(asked.found(), asked.written_out(torch.float64), strict=True):
        torch.testing.assert_close(found, truth, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_errors_are_at_most_twice_eager_torchs(name: str, dtype: torch.dtype, tiny: None) -> None:
    assert_as_good_as_eager(SINGLE[name], dtype)


EVERY = {"documents": [[3, 1, 9, 6], [19]], "window": 4, "softcap": 0.8, "sinks": True, "dropout": 0.3}
KERNELS = SINGLE | {"every": {**EVERY, "dropout_key": 7, "order": SINGLE["order"]["order"]}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KERNELS)
def test_the_op_launches_the_kernels_with_its_options(name: str, interpreted: None) -> None:
    assert_as_good_as_eager(KERNELS[name], torch.float32)


def assert_as_good_as_eager(given: dict[str, Any], dtype: torch.dtype) -> None:
    asked = Asked(given, dtype)
    results = zip(asked.found(), asked.written_out(dtype), asked.written_out(torch.float64), strict=True)
    for found, eager, truth in results:
        assert found.dtype == dtype
        allowed = 2 * (eager.double() - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.abs().max()
        assert (found.double() - truth).abs().max() <= allowed


def test_a_packed_row_is_its_documents_one_at_a_time() -> None:
    lengths = [1, 200, 57, 1, 130, 3]
    tensors = [normal(1, sum(lengths), width, seed=seed).float() for seed, width in enumerate((64, 32, 32))]
    ids, upstream = numbers_of(lengths)[None], normal(1, sum(lengths), 64).float()

    def run(tensors: list[Tensor], upstream: Tensor, **options: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        output = attention(*leaves, head_dim=16, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    alone: list[list[Tensor]] = []
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        alone.append(run([x[:, here] for x in tensors], upstream[:, here]))
        start += length
    for whole, *parts in zip(run(tensors, upstream, documents=ids), *alone, strict=True):
        torch.testing.assert_close(whole, torch.cat(parts, 1), atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that an op returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.element_size())
        return made


HELD: dict[str, dict[str, Any]] = {
    "plain": {},
    "not-causal": {"causal": False},
    "documents": {"documents": [700, 1, 323]},
    "documents-not-causal": {"documents": [700, 1, 323], "causal": False},
    "window": {"window": 100},
    "window-in-documents": {"window": 100, "documents": [700, 324]},
    "sinks": {"sinks": torch.zeros(2)},
    "order": {"order": ((512, 1024), (0, 512))},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout": 0.5, "dropout_key": 1, "documents": [1000, 24]},
}


@pytest.mark.few(2)
@pytest.mark.every_value
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["", "grouped"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
@pytest.mark.parametrize("given", HELD.values(), ids=HELD)
def test_nothing_of_tokens_by_tokens_is_in_memory(
    given: dict[str, Any], layout: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MOST_SCORES", 2**14)
    tokens, heads, head_dim = 1024, 2, 8
    if "documents" in given:
        given = {**given, "documents": numbers_of(given["documents"])[None]}

    def operand(heads: int) -> Tensor:
        made = torch.randn(1, tokens, heads * head_dim)
        if layout == "transposed":  # as if a convolution had made the operands
            made = made.mT.contiguous().mT
        return (torch.cat((made, made), -1)[..., : heads * head_dim] if layout == "strided" else made).requires_grad_()

    operands = [operand(each) for each in (heads, kv_heads, kv_heads)]
    with Largest() as largest:
        output = attention(*operands, head_dim=head_dim, **given)
        output.backward(torch.ones_like(output))
    assert largest.numbers <= 2 * heads * head_dim * tokens  # of two tensors like the query, side by side


@pytest.mark.parametrize("given", [{}, {"window": 100}, {"softcap": 5.0}, {"documents": [1500, 548]}], ids=str)
def test_nothing_of_tokens_by_tokens_is_in_memory_beside_a_cache(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MOST_SCORES", 2**14)
    cache, tokens = KeyValueCache(2048), torch.randn(1, 1024, 16)
    if "documents" in given:
        given = {**given, "documents": numbers_of(given["documents"])[None]}
    with torch.no_grad(), Largest() as largest:
        for _ in range(2):
            attention(tokens, tokens, tokens, head_dim=16, cache=cache, **given)
    assert largest.numbers <= 2 * 16 * 1024


def test_backward_saves_operands_the_output_and_a_number_a_row_and_head() -> None:
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tensors = [normal(2, 64, 32, seed=seed).float().requires_grad_() for seed in range(3)]
    ids = numbers_of([30, 34]).expand(2, -1)
    for given in ({}, {"documents": ids}, {"documents": ids, "softcap": 2.0}, {"window": 5}):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attention(*tensors, head_dim=8, **given)
        least = 4 * tensors[0].nbytes + 4 * 2 * 4 * 64
        ids_and_ranges = 8 * 64 + 2 * 2 * 64 * 8
        assert least <= sum(saved.values()) <= least + ids_and_ranges


@pytest.mark.parametrize("as_bounds", [False, True], ids=["ids", "bounds"])
def test_documents_that_change_after_forward_do_not_change_the_gradients(as_bounds: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = numbers_of([4, 1, 7])[None]
    documents = document_bounds(ids) if as_bounds else ids
    *tensors, upstream = (torch.randn(1, 12, 16, generator=generator) for _ in range(4))
    leaves = [each.requires_grad_() for each in tensors]
    expected = torch.autograd.grad(attention(*leaves, head_dim=8, documents=documents.clone()), leaves, upstream)
    output = attention(*leaves, head_dim=8, documents=documents)
    documents.numpy()[:] = 0  # as a loader that fills its memory anew; autograd sees no change
    for found, gradient in zip(torch.autograd.grad(output, leaves, upstream), expected, strict=True):
        assert torch.equal(found, gradient)
