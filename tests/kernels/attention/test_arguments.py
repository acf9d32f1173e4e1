"""Arguments of attention at the ends of their ranges: right, or refused with the remedy."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import attention, document_bounds

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, "scale is -1.0; give a number above 0"),
        ({"scale": 0.0}, "scale is 0.0; give a number above 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"softcap": 1e39}, r"softcap is 1e\+39; give a number above 0 and up to 1e\+38"),
        ({"window": 1.5}, "window is 1.5; give how many keys"),
        ({"head_dim": 4.0}, "head_dim is 4.0; give the size"),
        ({"head_dim": True}, "head_dim is True; give the size"),
        ({"documents": torch.zeros(1, 6, dtype=torch.complex64)}, "takes documents .* of torch.complex64"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(QUERY, KEY, VALUE, **({"head_dim": 4} | options))


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
    with pytest.raises(ValueError, match=r"takes documents as a tensor, got list; give torch\.tensor"):
        attention(QUERY, KEY, VALUE, head_dim=4, documents=ids)


@pytest.mark.parametrize(
    "ids", [torch.tensor(3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.complex64)], ids=["scalar", "f", "c"]
)
def test_bounds_of_what_is_no_ids_are_refused(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="document_bounds takes ids"):
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
