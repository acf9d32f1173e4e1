"""NaN and infinite numbers in a document of a row change no further document of the row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import attention
from weft.kernels.attention import compute

from tests.kernels.attention.cases import Case, launched

HEADS, KV_HEADS, D = 4, 2, 8
LENGTHS = {
    "short": [5, 4, 7],
    "one-token": [1, 1, 1, 1],
    "many-short": [3] * 30,
    "long": [200, 150, 30],
    "long-and-short": [1, 129, 2, 40],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {},
    "window": {"window": 3},
    "wide-window": {"window": 64},
    "not-causal": {"causal": False},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "dropout": {"dropout": 0.3, "dropout_key": 5},
    "order": {"order": True},
}
TENSORS = ("query", "key", "value", "gradient")


def output_and_gradients(tensors: list[Tensor], ids: Tensor, options: dict[str, Any]) -> list[Tensor]:
    *given, upstream = tensors
    leaves = [each.clone().requires_grad_() for each in given]
    if "order" in options:
        T = ids.shape[1]
        options = {**options, "order": ((T // 2, T), (0, T // 2))}
    output = attention(*leaves, head_dim=D, documents=ids, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("which", range(4), ids=TENSORS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_further_documents_keep_their_numbers_on_a_cpu(
    lengths: list[int], options: dict[str, Any], which: int, number: float
) -> None:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    if "order" in options:
        middle = ids.shape[1] // 2
        ids = torch.cat((ids[:, middle:], ids[:, :middle]), 1)  # documents of keys are stored as the keys are
    generator = torch.Generator().manual_seed(0)
    widths = (HEADS * D, KV_HEADS * D, KV_HEADS * D, HEADS * D)
    tensors = [torch.randn(1, ids.shape[1], width, generator=generator) for width in widths]
    expected = output_and_gradients(tensors, ids, options)
    for document in range(min(3, len(lengths))):
        spoiled = [each.clone() for each in tensors]
        spoiled[which][:, ids[0] == document] = number
        found = output_and_gradients(spoiled, ids, options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[:, ids[0] != document], other[:, ids[0] != document], rtol=0, atol=1e-5)
        # Torch's fused attention loses NaN scores of a document with a single token.
        if math.isnan(number) and which > 1:
            affected = found[1] if which == 3 else found[0]
            assert affected[:, ids[0] == document].isnan().any()


def test_a_nan_of_a_value_reaches_only_the_queries_that_see_it() -> None:
    ids = torch.tensor([[0] * 4 + [1] * 5])
    query, key, value = (torch.randn(1, 9, D, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    value[0, 6, 3] = math.nan
    output = attention(query, key, value, head_dim=D, documents=ids)
    assert output.isnan().nonzero().tolist() == [[0, token, 3] for token in (6, 7, 8)]


SINKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": torch.tensor([[0] * 4 + [1] * 5])},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout": 0.3, "dropout_key": 5},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("options", SINKS.values(), ids=SINKS)
def test_a_sink_is_a_logit_of_softmax(options: dict[str, Any], number: float, device: str) -> None:
    """A sink of NaN or infinity makes the head's output and gradients NaN; -inf is no sink; further heads keep theirs.

    With an infinite weight, a softmax by definition would give zeros, and hide the divergence of the model.
    """
    generator, T = torch.Generator().manual_seed(2), 9
    made = [torch.randn(1, T, width * D, generator=generator) for width in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *given, upstream = (each.to(device) for each in made)
    options = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in options.items()}

    def run(*sinks: float) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (*given, torch.tensor(sinks, device=device))]
        output = attention(*leaves[:3], head_dim=D, sinks=leaves[3], **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    found, expected = run(0.5, number, -0.5, 1.0), run(0.5, -1e4, -0.5, 1.0)  # -1e4 takes nothing
    for one, other, heads in zip(found, expected, (HEADS, HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True):
        one, other = (each.reshape(-1, heads, each.shape[-1] // heads) for each in (one, other))
        affected = [1] if heads == HEADS else [0]
        intact = [head for head in range(heads) if head not in affected or number == -math.inf]
        torch.testing.assert_close(one[..., intact, :], other[..., intact, :], rtol=0, atol=1e-6)
        if number != -math.inf:
            assert one[..., affected, :].isnan().all()


def test_finite_numbers_take_torchs_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[0] * 4 + [1] * 5])
    tensors = [torch.randn(1, 9, D) for _ in range(4)]
    monkeypatch.setattr(compute, "blocks", None)
    monkeypatch.setattr(compute, "select_passes", lambda query: None)
    output_and_gradients(tensors, ids, {})


KERNELS: dict[str, dict[str, Any]] = {
    "documents": {},
    "window": {"window": 6},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3},
    "not-causal": {"causal": False},
}
IDS = ((0,) * 16 + (1,) * 5 + (2,) * 11 + (3,) * 16, (7,) * 32 + (8,) * 16)  # interpreted blocks have 16 tokens
SHARES = (
    {0: {0}, 1: {1, 2}, 2: {1, 2}, 3: {3}},
    {7: {7}, 8: {8}},
)  # for each document, all documents in the blocks of this document


class Spoiled(Case):
    """A case with NaN or infinity in a document of each row, in the tensor named by `spoils`."""

    spoils: tuple[str, float, int] | None = None

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        made = super().tensors(dtype)
        if self.spoils is not None:
            name, number, order = self.spoils
            for row, ids in enumerate(IDS):
                made[name][row, torch.tensor(ids) == sorted({*ids})[order]] = number
        return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value", "grad"])
@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
def test_the_kernels_spoil_no_further_blocks(
    options: dict[str, Any], name: str, number: float, interpreted: None
) -> None:
    case = Spoiled(T=48, S=48, documents=IDS, **options)
    expected = launched(case, torch.float32, "cpu")
    for order in (0, 1):
        object.__setattr__(case, "spoils", (name, number, order))
        output, lse, *gradients = launched(case, torch.float32, "cpu")
        object.__setattr__(case, "spoils", None)
        for row, ids in enumerate(IDS):
            sharing = SHARES[row][sorted({*ids})[order]]
            intact = torch.tensor([each not in sharing for each in ids])
            for one, other in zip((output, *gradients[:3]), (expected[0], *expected[2:5]), strict=True):
                torch.testing.assert_close(one[row, intact], other[row, intact], rtol=0, atol=1e-5)
            torch.testing.assert_close(lse[row][:, intact], expected[1][row][:, intact], rtol=0, atol=1e-5)
        assert (gradients[0] if name == "grad" else output).isfinite().logical_not().any()
