"""The attention kernels against dense attention in float64: every option alone and in pairs, and all sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.attention.cases import Case, assert_correct, merged
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name: str, dtype: torch.dtype, device: str) -> None:
    assert_correct(merged(OPTIONS[name]), dtype, device)


def test_pairs_of_options(portion: Portion, device: str) -> None:
    dtypes = itertools.cycle(DTYPES)
    for pair in portion.of(PAIRS, every=6):
        assert_correct(merged(*(OPTIONS[name] for name in pair)), next(dtypes), device)


@pytest.mark.parametrize("head_dim", [1, 5, 16, 24, 64, 80, 128, 256])
def test_head_sizes(head_dim: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_correct(Case(T=19, S=19, heads=2, kv_heads=1, B=1, head_dim=head_dim), dtype, device)


@pytest.mark.parametrize("S", [0, 1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("T", [0, 1, 16, 17, 32])
def test_sizes(T: int, S: int, device: str) -> None:
    case = Case(T=T, S=S, places=(*range(S - T, S),), heads=2, kv_heads=1, B=2)
    assert_correct(replace(case, sinks=True), torch.float32, device)
    assert_correct(replace(case, sinks=True, causal=False, dropout=0.25), torch.float32, device)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("S", [21, 24], ids=["a-block-a-number", "a-block-for-eight"])
def test_dropout(S: int, p: float, device: str) -> None:
    assert_correct(Case(T=24, S=S, dropout=p, documents=((0,) * 3 + (1,) * (S - 3),) * 2), torch.float32, device)
