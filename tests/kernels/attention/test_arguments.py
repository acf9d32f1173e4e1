"""Arguments of attention at the ends of their ranges: right, or refused with the remedy."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import KeyValueCache, attention, document_bounds

GENERATOR = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (torch.randn(1, 6, 4, generator=GENERATOR) for _ in range(3))
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1]])
CALLS: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "causal": (QUERY, {}),
    "documents": (QUERY, {"documents": DOCUMENTS}),
    "fewer-queries": (QUERY[:, :2], {}),
    "in-order": (QUERY, {"order": ((3, 6), (0, 3))}),
    "softcap": (QUERY, {"softcap": 3.0, "documents": DOCUMENTS}),
}


@pytest.mark.parametrize("window", [6, 7, 2**31 - 1, 2**31, 2**31 + 5, 2**40, sys.maxsize, 2**70])
@pytest.mark.parametrize("name", CALLS)
def test_a_window_longer_than_the_keys_is_none(name: str, window: int) -> None:
    query, options = CALLS[name]
    expected = attention(query, KEY, VALUE, head_dim=4, **options)
    torch.testing.assert_close(attention(query, KEY, VALUE, head_dim=4, window=window, **options), expected)


NAN, INF = float("nan"), float("inf")
RANGE = r"give a number from 1e-18 to 1e\+18, or None"
NOT_ONE_NUMBER = ("0.5", [0.5], 1j, True, torch.tensor(0.5), torch.nn.Parameter(torch.tensor(0.5)))
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"scale": each}, f"scale is .*; {RANGE}; a query may be negated instead") for each in NOT_ONE_NUMBER),
    *(({"scale": each}, f"scale is {each}; {RANGE}") for each in (-1.0, 0.0, NAN, INF)),
    *(({"scale": each}, f"scale is .*; {RANGE}") for each in (1e39, 1e300, 1e-60)),
    *(({"softcap": each}, f"softcap is .*; {RANGE}") for each in NOT_ONE_NUMBER),
    *(({"softcap": each}, f"softcap is {each}; {RANGE}") for each in (-1.0, 0.0, NAN, INF)),
    *(({"softcap": each}, f"softcap is .*; {RANGE}") for each in (1e39, 1e-50)),
    *(({"window": each}, "window is .*; give how many keys a query sees, 1 or more") for each in (
        "3", [3], 1.5, NAN, True, torch.tensor(3)
    )),
    *(({"head_dim": each}, "head_dim is .*; give the size of a head") for each in (
        "4", None, [4], 4.0, True, torch.tensor(4)
    )),
    *(({"causal": each}, "causal is .*; give True or False") for each in ("no", None, 0, 1, torch.tensor(True))),
    *(({"dropout": each, "dropout_key": 1}, "dropout is .*; give a probability, 0 to 1") for each in (
        "0.1", [0.1], NAN, -0.1, True, None, torch.tensor(0.1)
    )),
    ({"dropout": "0.1"}, "dropout is '0.1'; give a probability, 0 to 1"),
    ({"sinks": [0.0]}, r"takes sinks as a tensor, got \[0\.0\]; give torch\.tensor\(sinks\)"),
    ({"sinks": 0.0}, r"takes sinks as a tensor, got 0\.0"),
    ({"cache": 5}, "cache is 5; give a KeyValueCache"),
    *(({"order": each}, "order is .*give runs") for each in (5, "ab", [3, 6], [(0, 3, 6)], [("0", "6")])),
    *(({"documents": each}, f"takes documents .* of {each.dtype}") for each in (
        torch.zeros(1, 6, dtype=torch.complex64), torch.zeros(1, 6, dtype=torch.bool)
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[f"{name}-{number}" for number, ((name, *_), _) in enumerate(REFUSED)]
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(QUERY, KEY, VALUE, **({"head_dim": 4} | options))


@pytest.mark.parametrize("made", [[[[0.0] * 4] * 6], None, "x", QUERY.numpy()], ids=["list", "none", "str", "numpy"])
@pytest.mark.parametrize("at", range(3))
def test_operands_that_are_no_tensors_are_refused(at: int, made: Any) -> None:
    operands = [made if i == at else each for i, each in enumerate((QUERY, KEY, VALUE))]
    with pytest.raises(ValueError, match=f"attention takes {('query', 'key', 'value')[at]} as a tensor, got "):
        attention(*operands, head_dim=4)


@pytest.mark.parametrize("capacity", [1.5, "3", True, None, 0])
def test_a_capacity_that_is_no_number_of_tokens_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match=r"capacity is .*; give a number of tokens, 1 or more"):
        KeyValueCache(capacity)


@pytest.mark.parametrize("name", ["head_dim", "window"])
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    given = {"head_dim": 4, "window": 4, "scale": 0.5, "softcap": 2.0}
    found = attention(QUERY, KEY, VALUE, **(given | {name: numpy.int64(4), "scale": numpy.float32(0.5)}))
    assert torch.equal(found, attention(QUERY, KEY, VALUE, **given))


@pytest.mark.parametrize("given", [{"scale": 1e-18, "softcap": 1e18}, {"scale": 1e18, "softcap": 1e-18}], ids=str)
def test_the_ends_of_scale_and_softcap_are_finite(given: dict[str, float]) -> None:
    leaves = [each.clone().requires_grad_() for each in (QUERY, KEY, VALUE)]
    output = attention(*leaves, head_dim=4, **given)
    gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert all(each.isfinite().all() for each in (output, *gradients))


BOUNDS = document_bounds(torch.tensor([[0, 0, 1, 1, 2, 2]]))


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        pytest.param(BOUNDS.flip(1), r"token 0 of row 0 are \[4, 6\]", id="decreasing"),
        pytest.param(BOUNDS.flip(-1), r"token 0 of row 0 are \[2, 0\]", id="stop-before-start"),
        pytest.param(BOUNDS - 1, r"token 0 of row 0 are \[-1, 1\]", id="negative"),
        pytest.param(BOUNDS.roll(1, 1), r"token 0 of row 0 are \[4, 6\]", id="of-the-token-before"),
    ],
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bounds_of_no_stretch_are_refused(bounds: Tensor, found: str, softcap: float | None) -> None:
    """Such bounds break the order on which ranges rely, and gave other gradients than values, without a word."""
    with pytest.raises(ValueError, match=found + ", which no stretch of tokens has; make bounds with document_bounds"):
        attention(QUERY, KEY, VALUE, head_dim=4, documents=bounds, softcap=softcap)


def test_documents_in_a_list_are_refused() -> None:
    ids: Any = [[0, 0, 0, 1, 1, 1]]
    with pytest.raises(ValueError, match=r"takes documents as a tensor, got \[\[0, .*; give torch\.tensor"):
        attention(QUERY, KEY, VALUE, head_dim=4, documents=ids)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(3),
        *(torch.zeros(2, 3, dtype=each) for each in (torch.float32, torch.complex64, torch.bool)),
        [0, 1],
    ],
    ids=["scalar", "f", "c", "bool", "list"],
)
def test_bounds_of_what_is_no_ids_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"document_bounds takes (ids|documents as a tensor)"):
        document_bounds(ids)


@pytest.mark.parametrize("T", [6, 200])
@pytest.mark.parametrize("name", ["window", "documents", "fewer-queries", "sinks"])
def test_a_default_device_changes_nothing(name: str, T: int) -> None:
    generator = torch.Generator().manual_seed(T)
    query, key, value = (torch.randn(1, T, 4, generator=generator) for _ in range(3))
    options: dict[str, Any] = {
        "window": {"window": 31 if T > 31 else 2},
        "documents": {"documents": (torch.arange(T) // 3)[None]},
        "fewer-queries": {},
        "sinks": {"sinks": torch.zeros(1)},
    }[name]
    if name == "fewer-queries":
        query = query[:, : T // 2]
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]

    def run() -> list[Tensor]:
        output = attention(*leaves, head_dim=4, **options)
        return [output, *torch.autograd.grad(output, leaves, torch.ones(output.shape, device="cpu"))]

    with torch.device("meta"):  # the first call plans for all later ones
        found = run()
    for one, other in zip(found, run(), strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
    dense = _dense(query, key, value, options)
    torch.testing.assert_close(found[0], dense)


def _dense(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    T, S = query.shape[1], key.shape[1]
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
    seen = (j <= i) & (j > i - options.get("window", S))
    if "documents" in options:
        ids = options["documents"][0]
        seen &= ids[S - T :, None] == ids[None]
    scores = (query @ key.mT / 2).masked_fill(~seen, -torch.inf)
    if "sinks" in options:
        scores = torch.cat([scores, torch.zeros(1, T, 1)], -1)
        value = torch.cat([value, torch.zeros(1, 1, 4)], 1)
    return scores.softmax(-1) @ value
