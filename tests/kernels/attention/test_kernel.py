"""The attention kernels against dense attention in float64: every option alone and in pairs, and all sizes."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.attention.cases import Case, assert_correct, launched, merged
from tests.kernels.matmul.test_large_offsets import apart
from tests.support.sample import Portion

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DOCUMENTS = ((0,) * 6 + (1,) + (2,) * 11 + (3,) * 3, (7,) * 21)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 6},
    "documents": {"documents": DOCUMENTS},
    "fewer-queries": {"T": 9},
    "runs-of-queries": {"T": 9, "places": (0, 1, 2, 3, 13, 14, 15, 16, 20)},
    "nothing-seen": {"T": 18, "places": (*range(-12, 6),)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.7},
    "dropout": {"dropout": 0.3},
    "dropout-by-places": {"dropout": 0.3, "by_places": True},
    "gradient-of-the-logsumexp": {"grad_lse": True},
    "strided": {"strided": True},
    "one-key-head": {"kv_heads": 1},
    "as-many-key-heads": {"kv_heads": 4},
}
APART = (
    {"full", "window"}, {"fewer-queries", "runs-of-queries"}, {"fewer-queries", "nothing-seen"},
    {"runs-of-queries", "nothing-seen"}, {"documents", "nothing-seen"}, {"dropout", "dropout-by-places"},
    {"one-key-head", "as-many-key-heads"},
)  # fmt: skip
PAIRS = [pair for pair in itertools.combinations([*OPTIONS][1:], 2) if {*pair} not in APART]


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of the tensors: the kernels are interpreted on a CPU, or run on a GPU."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail("asked for a GPU, but torch sees none")
    return "cuda"


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name: str, dtype: torch.dtype, device: str) -> None:
    assert_correct(merged(OPTIONS[name]), dtype, device)


@pytest.mark.exhaustive
def test_pairs_of_options(portion: Portion, device: str) -> None:
    dtypes = itertools.cycle(DTYPES)
    for pair in portion.of(PAIRS, every=12):
        assert_correct(merged(*(OPTIONS[name] for name in pair)), next(dtypes), device)


@pytest.mark.few(1)
@pytest.mark.parametrize("head_dim", [1, 5, 16, 24, 64, 80, 128, 256])
def test_head_sizes(head_dim: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_correct(Case(T=19, S=19, heads=2, kv_heads=1, B=1, head_dim=head_dim), dtype, device)


@pytest.mark.few(2)
@pytest.mark.parametrize("S", [0, 1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("T", [0, 1, 16, 17, 32])
def test_sizes(T: int, S: int, device: str) -> None:
    case = Case(T=T, S=S, places=(*range(S - T, S),), heads=2, kv_heads=1, B=2)
    assert_correct(replace(case, sinks=True), torch.float32, device)
    assert_correct(replace(case, sinks=True, causal=False, dropout=0.25), torch.float32, device)


@pytest.mark.parametrize("p", [0.5, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (0.0, 1.0))])
@pytest.mark.parametrize("S", [21, 24], ids=["a-block-a-number", "a-block-for-eight"])
def test_dropout(S: int, p: float, device: str) -> None:
    assert_correct(Case(T=24, S=S, dropout=p, documents=((0,) * 3 + (1,) * (S - 3),) * 2), torch.float32, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("block_t", "block_s"), [(32, 16), (16, 32), (64, 64)], ids=str)
def test_block_sizes(block_t: int, block_s: int, interpreted: None) -> None:
    from weft.kernels.attention.launch import AttentionLaunch

    launch = AttentionLaunch(block_t=block_t, block_s=block_s, warps=1, stages=1)
    documents = ((0,) * 29 + (1,) * 3 + (2,) * 38, (0,) * 70)
    for more in ({"dropout": 0.3}, {"window": 20, "softcap": 2.0}):
        case = merged({"T": 70, "S": 70, "heads": 2, "documents": documents, "sinks": True}, more)
        assert_correct(case, torch.float32, "cpu", (launch, (launch, launch)))


@pytest.mark.exhaustive
def test_repeats_give_the_same_bits(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = merged({"kv_heads": 1, "sinks": True, "dropout": 0.2, "documents": DOCUMENTS})
        first, later = (launched(case, dtype, device) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, later, strict=True))


def test_a_sink_that_takes_nothing(interpreted: None) -> None:
    """A sink of -inf is no sink, also for a row that sees nothing."""
    launch = importlib.import_module("weft.kernels.attention.launch")
    case = merged(OPTIONS["nothing-seen"])
    given = case.tensors(torch.float32)
    query, key, value, grad = (given[name] for name in ("query", "key", "value", "grad"))
    results = []
    for sinks in (None, torch.full((case.heads,), -torch.inf)):
        output, lse = launch.forward(query, key, value, case.ranges(), sinks, head_dim=16, scale=0.25)
        gradients = launch.backward(grad, query, key, value, output, lse, case.ranges(), sinks, head_dim=16, scale=0.25)
        results.append([output, lse, *gradients])
    for one, other in zip(results[0][:5], results[1][:5], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(results[1][5], torch.zeros(case.heads))


@pytest.mark.parametrize("dim", [0, 1], ids=["batches", "rows"])
def test_offsets_beyond_32_bits(dim: int, interpreted: None) -> None:
    launch = importlib.import_module("weft.kernels.attention.launch")
    case = Case(B=3, T=3, S=3, heads=2, kv_heads=1)
    given = case.tensors(torch.bfloat16)
    found = []
    for names in ((), ("query", "grad"), ("key", "value")):
        query, key, value, grad = (
            apart(given[name][: 3 if dim == 0 else 1], dim) if name in names else given[name][: 3 if dim == 0 else 1]
            for name in ("query", "key", "value", "grad")
        )
        output, lse = launch.forward(query, key, value, case.ranges(), head_dim=16, scale=0.25)
        gradients = launch.backward(grad, query, key, value, output, lse, case.ranges(), head_dim=16, scale=0.25)
        found.append([output, lse, *gradients[:3]])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
