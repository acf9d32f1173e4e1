"""The op: options, values and gradients on plain tensors and on meshes, beside scores written out; bad input."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import KeyValueCache, attention, document_bounds
from weft.mesh import Layout, LayoutError, derive_key
from weft.reshard import distribute, layout_of, to_global
from weft.reshard.world.groups import world_cache

from tests.kernels.attention.dense import Dropped, dense, seen_by
from tests.kernels.cases import FOUR, GRID, TWO, assert_names_a_remedy, normal, upstream_of
from tests.support.pool import Pool

B, HEADS, KV_HEADS, D = 3, 4, 2, 2
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0], [5, 5, 3, 3, 3, 3, 4]])
SINKS = normal(8, seed=4)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    head_dim: int,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: int = 0,
) -> Tensor:
    """Attention with every score written out; dropout draws each weight's number by its place in [B, heads, T, S]."""
    q, k, v = (x.reshape(lead, *x.shape[-2:]) for x in (query, key, value) for lead in [query.shape[:-2].numel()])
    seen = seen_by(q.shape[1], k.shape[1], causal=causal, window=window, documents=documents)
    sizes = (len(q), q.shape[-1] // head_dim, q.shape[1], k.shape[1])
    index = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    dropped = Dropped(dropout, dropout_key, index) if dropout else None
    output, _ = dense(q, k, v, seen, head_dim=head_dim, softcap=softcap, sinks=sinks, dropped=dropped)
    return output.reshape(query.shape)


def op(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, **options: Any) -> Tensor:
    return attention(query, key, value, head_dim=D, sinks=sinks, **options)


def operands(T: int, S: int, *lead: int, heads: int = HEADS, sinks: bool = False) -> list[Tensor]:
    """The query, the key, the value, and the sinks where they are asked for."""
    kv = [normal(*lead, S, KV_HEADS * D, seed=seed) for seed in (1, 2)]
    return [normal(*lead, T, heads * D), *kv, *[SINKS[:heads]] * sinks]


def split(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The options without `sinks`, and whether they have sinks."""
    return {name: each for name, each in options.items() if name != "sinks"}, "sinks" in options


OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {"documents": PACKED},
    "documents-not-causal": {"documents": PACKED, "causal": False},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-above-all": {"window": 99},
    "window-and-documents": {"window": 2, "documents": PACKED},
    "dropout": {"dropout": 0.3, "dropout_key": 11},
    "dropout-not-causal": {"dropout": 0.3, "dropout_key": 11, "causal": False},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "softcap-sinks-and-documents": {"softcap": 0.7, "sinks": True, "documents": PACKED},
    "all": {"dropout": 0.5, "dropout_key": 12, "window": 3, "documents": PACKED, "softcap": 2.0, "sinks": True},
}


def with_gradients(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream_of(output.shape).to(output.dtype))]


@pytest.mark.parametrize("T", [7, 4, 1], ids=["as-many-queries", "fewer-queries", "one-query"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_and_gradients(options: dict[str, Any], T: int) -> None:
    options, sinks = split(options)
    found = with_gradients(partial(op, **options), operands(T, 7, B, sinks=sinks))
    wanted = with_gradients(partial(attend, head_dim=D, **options), operands(T, 7, B, sinks=sinks))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("lead", [(), (2, 3), (0,)], ids=str)
def test_any_leading_dims(lead: tuple[int, ...]) -> None:
    documents = torch.zeros(*lead, 7, dtype=torch.int64)
    documents[..., 4:] = 1
    options = {"documents": documents, "dropout": 0.25, "dropout_key": 3}
    for asked in (options, {"documents": documents}):
        found = with_gradients(partial(op, **asked), operands(7, 7, *lead, sinks=True))
        wanted = with_gradients(partial(attend, head_dim=D, **asked), operands(7, 7, *lead, sinks=True))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("order", [None, ((5, 7), (0, 1), (3, 5), (1, 3))], ids=["as-read", "in-order"])
def test_bounds_stand_for_the_ids_they_come_from(order: tuple[tuple[int, int], ...] | None) -> None:
    tensors, ids, bounds = operands(7, 7, B), PACKED, document_bounds(PACKED)
    if order is not None:
        ids, bounds = (torch.cat([x[:, start:stop] for start, stop in order], 1) for x in (ids, bounds))
    for options in ({}, {"dropout": 0.5, "dropout_key": 3}, {"window": 2}):
        run = partial(op, *tensors, order=order, **options)
        assert torch.equal(run(documents=bounds), run(documents=ids))


def test_documents_are_attended_to_as_if_each_stood_alone() -> None:
    query, key, value = operands(7, 7, B)
    whole = attention(query, key, value, head_dim=D, documents=PACKED)
    for start, stop in ((0, 3), (3, 5), (5, 7)):
        alone = attention(*(x[:1, start:stop] for x in (query, key, value)), head_dim=D)
        torch.testing.assert_close(whole[:1, start:stop], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["window-and-documents", "dropout", "softcap-sinks-and-documents"])
def test_low_precision_errs_no_more_than_eager_torch(name: str, dtype: torch.dtype) -> None:
    options, sinks = split(OPTIONS[name])
    low = [tensor.to(dtype) for tensor in operands(7, 7, B, sinks=sinks)]
    wide = [tensor.double() for tensor in low]
    truths, eager, found = (
        with_gradients(function, tensors)
        for function, tensors in (
            (partial(attend, head_dim=D, **options), wide), (partial(attend, head_dim=D, **options), low),
            (partial(op, **options), low),
        )
    )  # fmt: skip
    for truth, usual, ours in zip(truths, eager, found, strict=True):
        assert ours.dtype == dtype
        allowed = 2 * (usual.double() - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.abs().max()
        assert (ours.double() - truth).abs().max() <= allowed


def test_dropout_by_name_and_by_a_tensor() -> None:
    run = partial(attention, *operands(7, 7, B), head_dim=D, dropout=0.5)
    drawn = run(dropout_key=7)
    assert torch.equal(run(dropout_key=torch.tensor(7, dtype=torch.uint64)), drawn)
    named = run(dropout_key=derive_key(7, "layers.3"))
    assert torch.equal(run(dropout_key=7, dropout_name="layers.3"), named)
    assert not torch.equal(named, drawn)


PLAIN = {"causal": {}, "all-keys": {"causal": False}, "wide-window": {"window": 9}}


@pytest.mark.parametrize("heads", [2, 4], ids=["every-key-head", "grouped"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls_can_run_torchs_function_inside_the_op(
    name: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do on a GPU, until a measurement says otherwise."""
    module = importlib.import_module("weft.kernels.attention.sharded.op")
    monkeypatch.setattr(module, "runs_natively", lambda *tensors: False)
    monkeypatch.setattr(module, "_torch_is_faster", lambda *call: True)
    monkeypatch.setattr(module, "ATTENTION", None)
    tensors = operands(7, 7, B, heads=heads)
    found = with_gradients(partial(op, **PLAIN[name]), tensors)
    wanted = with_gradients(partial(attend, head_dim=D, **PLAIN[name]), tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


# With a cache


CACHED = {
    name: OPTIONS[name]
    for name in (
        "documents", "window", "window-of-one", "window-and-documents", "softcap", "sinks",
        "softcap-sinks-and-documents",
    )
} | {"plain": {}}  # fmt: skip


def read_on(laid: Any, pieces: list[int], options: dict[str, Any]) -> Tensor:
    """The output of seven tokens read in pieces. laid: how an operand is laid out."""
    options, sinks = split(options)
    query, key, value, *more = operands(7, 7, B, sinks=sinks)
    cache, outputs, start = KeyValueCache(9), [], 0
    if "documents" in options:
        later = torch.full((B, 2), 99)  # later tokens'
        options = {**options, "documents": laid(torch.cat((options["documents"], later), 1), documents=True)}
    for n in pieces:
        each = (laid(x[:, start : start + n]) for x in (query, key, value))
        outputs.append(op(*each, *more, cache=cache, **options))
        start += n
        assert cache.length == start
    return torch.cat([to_global(each) if isinstance(each, DTensor) else each for each in outputs], 1)


PIECES = [pytest.param(pieces, id="-".join(map(str, pieces))) for pieces in ([7], [1] * 7, [3, 1, 2, 1], [0, 7, 0])]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("options", CACHED.values(), ids=CACHED)
def test_with_a_cache_it_is_what_it_is_at_once(options: dict[str, Any], pieces: list[int]) -> None:
    given, sinks = split(options)
    expected = attend(*operands(7, 7, B, sinks=sinks), head_dim=D, **given)
    found = read_on(lambda x, documents=False: x, pieces, options)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def with_a_cache_on_mesh(text: str, documents_text: str, options: dict[str, Any]) -> Tensor:
    def laid(x: Tensor, documents: bool = False) -> Tensor:
        return distribute(x, Layout(GRID, documents_text if documents else text))

    return read_on(laid, [3, 1, 2, 1], options)


@pytest.mark.few(1)
@pytest.mark.parametrize("layouts", [("dp: S(0), tp: S(2)", "dp: S(0)"), ("tp: S(2)", ""), ("", "")], ids=str)
def test_on_a_mesh_a_cache_holds_what_the_keys_do(pool: Pool, layouts: tuple[str, str]) -> None:
    expected = attend(*operands(7, 7, B), head_dim=D, window=2, documents=PACKED)
    for found in pool.run(with_a_cache_on_mesh, *layouts, OPTIONS["window-and-documents"]):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def specs_of_a_step() -> tuple[int, list[str]]:
    """The numbers of cached objects of this world after each token, and the errors for sharded tokens."""
    layout = Layout(TWO, "tp: S(2)")
    cache, sizes = KeyValueCache(8), []
    for _ in range(4):
        query, key = distribute(normal(B, 1, 8), layout), distribute(normal(B, 1, 8), layout)
        attention(query, key, key, head_dim=D, cache=cache)
        sizes.append(len(world_cache()))
    messages = []
    for text in ("tp: S(1)", "tp: P(sum)"):
        x = distribute(normal(B, 2, 8), Layout(TWO, text))
        with pytest.raises(LayoutError) as caught:
            attention(x, x, x, head_dim=D, cache=KeyValueCache(8))
        messages.append(str(caught.value))
    return sizes[-1] - sizes[0], messages


def test_a_step_finds_all_that_the_step_before_made(pool: Pool) -> None:
    for more, messages in pool.run(specs_of_a_step, ranks=2):
        assert more == 0
        for message in messages:
            assert_names_a_remedy(message)


def test_arguments_that_do_not_fit_a_cache_are_named() -> None:
    query, key, value = operands(3, 3, B)
    cache = KeyValueCache(5)
    run = partial(attention, head_dim=D, cache=cache)
    run(query, key, value)
    for message, tensors, options in (
        (r"KeyValueCache\(3 of 5 tokens\) has no room for 3 more; .* capacity 6", (query, key, value), {}),
        ("holds keys of shape", operands(1, 1, 2), {}),
        ("3 queries and 2 keys", (query, key[:, :2], value[:, :2]), {}),
        ("query, key and value of the new tokens only; got causal=False", (query, key, value), {"causal": False}),
        (r"dropout=0.5; call model.eval\(\)", (query, key, value), {"dropout": 0.5, "dropout_key": 1}),
        (r"documents \[\.\.\., 5\]", operands(1, 1, B), {"documents": PACKED}),
    ):
        with pytest.raises(ValueError, match=message):
            run(*tensors, **options)
    with pytest.raises(RuntimeError, match=r"has no gradient; call the model in torch.no_grad\(\)"):
        run(*(x[:, :1].requires_grad_() for x in (query, key, value)))
    assert cache.length == 3
    with pytest.raises(ValueError, match="capacity is 0"):
        KeyValueCache(0)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        pytest.param([(2, 8), (2, 8), (3, 8)], r"got \(2, 8\), \(2, 8\) and \(3, 8\); reshape them", id="key-value"),
        pytest.param([(2, 2, 8), (2, 8), (2, 8)], r"got \(2, 2, 8\), \(2, 8\) and \(2, 8\)", id="leading"),
        pytest.param([(2, 8), (2, 6), (2, 6)], r"\[\.\.\., S, kv_heads \* 4\]", id="head-dim"),
        pytest.param([(2, 12), (2, 8), (2, 8)], "where kv_heads divides heads", id="groups"),
        pytest.param([(2, 8), (2, 0), (2, 0)], "where kv_heads divides heads", id="no-heads"),
        pytest.param([(8,), (8,), (8,)], r"got \(8,\), \(8,\) and \(8,\)", id="no-tokens-dim"),
        pytest.param([(3, 8), (2, 8), (2, 8)], "as many keys as queries, got 2 and 3; give the missing", id="too-few"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*(normal(*shape) for shape in shapes), head_dim=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"window": 0}, "window is 0; give how many keys a query sees, 1 or more", id="no-window"),
        pytest.param({"window": 3, "causal": False}, "a window of 3 needs causal=True", id="window-not-causal"),
        pytest.param({"dropout": 1.5, "dropout_key": 1}, "dropout is 1.5; give a probability", id="dropout"),
        pytest.param({"dropout": 0.5}, "dropout needs a key, and dropout_key is None; give derive_key", id="no-key"),
        pytest.param({"dropout": 0.5, "dropout_key": -1}, "dropout_key is an int of 64 bits, got -1", id="key"),
        pytest.param(
            {"documents": torch.zeros(B, 6, dtype=torch.int64)},
            r"documents \[\.\.\., 7\] of ints, one for each key, or their bounds \[\.\.\., 7, 2\], got \(3, 6\)",
            id="documents",
        ),
        pytest.param({"documents": torch.zeros(B, 7)}, r"of ints, .* got \(3, 7\) of torch.float32", id="float-ids"),
        pytest.param(
            {"documents": torch.tensor([[0] * 7, [1] * 7, [5, 5, 3, 3, 3, 5, 5]])},
            "document 5 of row 2 ended before token 2 and comes back at token 5; give each",
            id="document-again",
        ),
        pytest.param({"softcap": 0.0}, r"softcap is 0.0; give a number from 1e-18 to 1e\+18, or None", id="no-softcap"),
        pytest.param({"softcap": float("inf")}, "softcap is inf; give a number", id="infinite-softcap"),
        pytest.param({"sinks": torch.zeros(3)}, r"takes sinks \[4\], one for each head, .* got \(3,\)", id="sinks"),
        pytest.param({"sinks": torch.zeros(4, dtype=torch.int32)}, "got .* of torch.int32", id="integer-sinks"),
        pytest.param({"head_dim": 257}, "head_dim is 257; give the size of a head, 1 to 256", id="head-dim"),
    ],
)
def test_an_option_that_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*operands(7, 7, B), **{"head_dim": D, **options})


# On meshes


LAYOUTS = {  # of query, of key and value, of documents, of sinks
    "heads": (TWO, "tp: S(2)", "tp: S(2)", "", "tp: S(0)"),
    "heads-by-four": (FOUR, "tp: S(2)", "tp: S(2)", "", "tp: S(0)"),
    "rows": (TWO, "tp: S(0)", "tp: S(0)", "tp: S(0)", ""),
    "rows-and-heads": (GRID, "dp: S(0), tp: S(2)", "dp: S(0), tp: S(2)", "dp: S(0)", "tp: S(0)"),
    "queries": (TWO, "tp: S(1)", "", "", ""),
    "queries-by-four": (FOUR, "tp: S(1)", "", "", ""),
    "queries-and-heads": (GRID, "dp: S(1), tp: S(2)", "tp: S(2)", "", "tp: S(0)"),
}


def on_mesh(name: str, T: int, kv_heads: int) -> None:
    """Values, gradients and the output's layout, for every set of options."""
    mesh, query_layout, kv_layout, documents_layout, sinks_layout = LAYOUTS[name]
    tensors = [normal(B, T, 8 * D), *(normal(B, 7, kv_heads * D, seed=seed) for seed in (1, 2)), SINKS]
    layouts = (query_layout, kv_layout, kv_layout, sinks_layout)
    laid = [distribute(x, Layout(mesh, text)) for x, text in zip(tensors, layouts, strict=True)]
    for asked in OPTIONS.values():
        options, sinks = split(asked)
        placed = dict(options)
        if "documents" in options:
            placed["documents"] = distribute(options["documents"], Layout(mesh, documents_layout))
        leaves = [tensor.detach().requires_grad_() for tensor in laid[: 3 + sinks]]
        output = op(*leaves, **placed)
        assert layout_of(output) == Layout(mesh, query_layout)
        upstream = distribute(upstream_of(output.shape), layout_of(output))
        found = [output, *torch.autograd.grad(output, leaves, upstream)]
        wanted = with_gradients(partial(attend, head_dim=D, **options), tensors[: 3 + sinks])
        for one, other in zip(found, wanted, strict=True):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(to_global(one.detach()), other, atol=1e-12, rtol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("T", [7, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_a_mesh_it_sees_and_drops_what_it_does_on_one_process(pool: Pool, name: str, T: int) -> None:
    pool.run(on_mesh, name, T, 4, ranks=LAYOUTS[name][0].size)


def refused() -> list[str]:
    query, key, value = (distribute(normal(4, 6, 8), Layout(GRID, "dp: S(0), tp: S(2)")) for _ in range(3))
    documents = torch.zeros(4, 6, dtype=torch.int64)
    messages = []
    for text in (None, "", "dp: S(1)", "dp: S(0), tp: S(1)"):
        laid = documents if text is None else distribute(documents, Layout(GRID, text))
        with pytest.raises(LayoutError) as caught:
            attention(query, key, value, head_dim=D, documents=laid)
        messages.append(str(caught.value))
    with pytest.raises(LayoutError) as caught:
        attention(query, distribute(normal(4, 6, 8), Layout(GRID, "dp: S(0), tp: S(1)")), value, head_dim=D)
    return [*messages, str(caught.value)]


def test_layouts_that_do_not_fit_are_refused_with_a_remedy(pool: Pool) -> None:
    for messages in pool.run(refused):
        for message in messages:
            assert_names_a_remedy(message)
        assert all("reshard the documents to (dp: S(0), tp: R)" in message for message in messages[:4]), messages
