"""`model(tokens, targets=targets)`: the tokens' losses from the head, and their sums by document, on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weft.models import (
    GPTConfig,
    LlamaConfig,
    QwenMoeConfig,
    RouterLosses,
    document_sums,
    initialize,
    lora,
)
from weft.models.families import make_model

from tests.models.cases import gradients_off

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_kv_heads=2),
    "tied": LlamaConfig(**SIZES, tie_embeddings=True),
    "gpt": GPTConfig(**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, max_seq_len=16),
    "experts": QwenMoeConfig(**SIZES, num_experts=4, experts_per_token=2, moe_intermediate_size=12),
}


def model_of(config: Any) -> Any:
    model = make_model(config)
    initialize(model, 0)
    return model


def batch(B: int = 3, T: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 61, (2, B, T), generator=generator)
    return tokens, targets.masked_fill(torch.rand(B, T, generator=generator) < 0.3, -100)


def by_torch(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view(targets.shape)


def gradients(model: Any, losses: Tensor) -> dict[str, Tensor]:
    weights = torch.rand(losses.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (losses * weights).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("name", "adapted"),
    # a head whose weight is tied has no adapter
    [
        (name, adapted)
        for name in CONFIGS
        for adapted in (False, True)
        if not (adapted and CONFIGS[name].tie_embeddings)
    ],
    ids=str,
)
def test_token_losses_and_their_gradients_are_those_of_the_logits(name: str, adapted: bool) -> None:
    model, (tokens, targets) = model_of(CONFIGS[name]), batch()
    if adapted:
        lora(model, 2, 4.0, ["lm_head"])
        torch.nn.init.normal_(model.lm_head.lora.B, generator=torch.Generator().manual_seed(2))
    wanted = by_torch(model(tokens), targets)
    losses = model(tokens, targets=targets)
    assert losses.dtype == torch.float32 and losses.shape == tokens.shape and not losses[targets == -100].any()
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-6)
    found, truth = gradients(model, losses), gradients(model, wanted)
    assert found.keys() == truth.keys()
    assert not gradients_off(found, truth)


def test_a_mixture_gives_its_statistics_beside_the_losses() -> None:
    model, (tokens, targets) = model_of(CONFIGS["experts"]), batch()
    logits, statistics = model(tokens, router=True)
    losses, same = model(tokens, router=True, targets=targets)
    torch.testing.assert_close(losses, by_torch(logits, targets), rtol=0, atol=1e-6)
    assert torch.equal(same, statistics)
    result = RouterLosses(lambda losses, targets: losses.sum())((losses, same), targets)
    assert result.routers is not None and result.sums is None and result.loss > losses.sum()


def test_autocast_gives_float32_losses_of_bfloat16_products() -> None:
    model, (tokens, targets) = model_of(CONFIGS["llama"]), batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses, logits = model(tokens, targets=targets), model(tokens)
    assert losses.dtype == torch.float32 and logits.dtype == torch.bfloat16
    torch.testing.assert_close(losses, by_torch(logits.float(), targets), rtol=0, atol=0.05)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an op returns, inside this context."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else (output,):
            self.numel = max(self.numel, each.numel() if isinstance(each, Tensor) else 0)
        return output


@pytest.mark.exhaustive
def test_no_op_returns_all_logits() -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 60_000, "num_layers": 1})
    model, (B, T) = model_of(config), (8, 128)
    tokens = torch.randint(0, 60_000, (B, T), generator=torch.Generator().manual_seed(0))
    with Largest() as seen:
        model(tokens, targets=tokens).sum().backward()
    assert seen.numel < B * T * 60_000 / 2
    with Largest() as seen, torch.no_grad():
        model(tokens)
    assert seen.numel >= B * T * 60_000


def test_targets_of_another_shape_are_refused() -> None:
    model, (tokens, targets) = model_of(CONFIGS["llama"]), batch()
    with pytest.raises(ValueError, match=r"targets have shape \(3, 6\), but there are outputs for \(3, 7\)"):
        model(tokens, targets=targets[:, 1:])
    with pytest.raises(ValueError, match="leave out last=True"):
        model(tokens, targets=targets, last=True)


@pytest.mark.parametrize(("B", "T", "D"), [(3, 7, 4), (1, 1, 1), (2, 5, 9), (0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_sums_by_document_and_their_gradients(B: int, T: int, D: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(B, T, generator=generator).requires_grad_()
    documents = torch.randint(-1, D + 2, (B, T), generator=generator)
    wanted = torch.zeros(B, D, dtype=torch.float64)
    for row in range(B):
        for token in range(T):
            if 0 <= documents[row, token] < D:
                wanted[row, documents[row, token]] += values[row, token].item()
    sums = document_sums(values, documents, D)
    torch.testing.assert_close(sums.double(), wanted, rtol=0, atol=1e-6)
    slopes = torch.randn(B, D, generator=generator)
    (gradient,) = torch.autograd.grad((sums * slopes).sum(), values)
    padded = F.pad(slopes, (1, 2))  # number -1, and the two past the end
    torch.testing.assert_close(gradient, padded.gather(1, documents + 1), rtol=0, atol=0)


def test_sums_take_32_bit_numbers_and_leave_out_values_that_are_not_finite() -> None:
    values, documents = torch.tensor([[1.0, float("nan"), 2.0]]), torch.tensor([[0, 1, 0]], dtype=torch.int32)
    assert document_sums(values, documents, 1).tolist() == [[3.0]]


def test_wrong_arguments_of_sums_are_refused() -> None:
    values, documents = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"documents of equal shape, got \(2, 3\) and \(2, 2\)"):
        document_sums(values, documents[:, 1:], 1)
    with pytest.raises(ValueError, match=r"documents are torch\.float32; give ints"):
        document_sums(values, values, 1)
    with pytest.raises(ValueError, match="num_documents is -1; give 0 or more"):
        document_sums(values, documents, -1)
