"""Masks given by the caller: every stage that uses a mask gets its microbatches' part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import ParallelPlan, PipelinePlan, forward_backward, parallelize

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import MICROBATCHES, batch, make

Found = tuple[float, dict[str, Tensor]]


def documents() -> Tensor:
    """The document number of each token; documents end at different tokens in each row."""
    rows, tokens = batch()[0].shape
    ends = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(2)) < 0.3
    return ends.cumsum(1)


def with_documents(name: str, axes: dict[str, int] | None, plan: dict[str, Any], **inputs: Any) -> Found:
    model = make(name, layers=4)
    if axes is not None:
        cut = PipelinePlan(microbatches=MICROBATCHES, **plan.pop("pipeline", {}))
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan, pipeline=cut))
    loss = forward_backward(model, cross_entropy, *batch(), **inputs)
    return loss.item(), {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def assert_same(found: list[Found], truth: Found) -> None:
    for loss, gradients in found:
        assert loss == pytest.approx(truth[0], rel=1e-5)
        assert not gradients_off(gradients, truth[1])
    assert set().union(*(gradients for _, gradients in found)) == truth[1].keys()


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("axes", "plan", "name"),
    [
        pytest.param({"pp": 2}, {}, "llama", id="pp2"),
        pytest.param({"pp": 2}, {"pipeline": {"schedule": "interleaved"}}, "gpt", id="pp2-interleaved", marks=MORE),
        pytest.param({"pp": 2, "dp": 2}, {"zero": 3, "recompute": "full"}, "qwen", id="pp2-dp2", marks=MORE),
        pytest.param({"pp": 2, "cp": 2}, {"context": "all_gather"}, "llama", id="pp2-cp2", marks=MORE),
        pytest.param({"pp": 2, "tp": 2}, {"sequence": True}, "gpt", id="pp2-tp2", marks=MORE),
    ],
)
def test_documents_are_seen_on_every_stage(axes: dict[str, int], plan: dict[str, Any], name: str, pool: Any) -> None:
    truth = with_documents(name, None, {}, documents=documents())
    assert abs(with_documents(name, None, {})[0] - truth[0]) > 1e-4 * truth[0]  # the documents hide some keys
    ranks = ProcessMesh.grid(**axes).size
    assert_same(pool.run(from_outside, axes, plan, name, ranks=ranks), truth)


def from_outside(axes: dict[str, int], plan: dict[str, Any], name: str) -> Found:
    return with_documents(name, axes, plan, documents=documents())


class Averaging(nn.Module):
    """Layers that take means over the tokens shown by a mask, weighted by a layer that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 8)
        self.weigh = nn.Linear(1, 1)
        self.layers = nn.ModuleList(Average() for _ in range(4))
        self.head = nn.Linear(8, 31)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones(*tokens.shape, tokens.shape[1], device=tokens.device)
        weights = self.weigh(mask[..., None])[..., 0] * mask  # [B, T, T]
        x = self.table(tokens)  # [B, T, 8]
        for layer in self.layers:
            x = layer(x, weights)
        return self.head(x)


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(weights @ x))


def averaged(axes: dict[str, int] | None, schedule: Any) -> Found:
    torch.manual_seed(5)
    model = Averaging()
    if axes is not None:
        cut = PipelinePlan(microbatches=MICROBATCHES, schedule=schedule)
        parallelize(model, ProcessMesh.grid(**axes), ParallelPlan(pipeline=cut))
    given = documents()
    mask = (given[:, :, None] == given[:, None, :]).float().tril()

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    loss = forward_backward(model, criterion, *batch(), mask=mask)
    return loss.item(), {name: whole(each.grad) for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        pytest.param({"pp": 2}, "1f1b", id="pp2"),
        pytest.param({"pp": 4}, "zero_bubble", id="pp4-zero-bubble", marks=MORE),
    ],
)
def test_a_mask_of_a_model_of_ones_own(axes: dict[str, int], schedule: str, pool: Any) -> None:
    truth, found = averaged(None, None), pool.run(averaged, axes, schedule, ranks=axes["pp"])
    assert_same(found, truth)
    for _, gradients in found:
        assert {"weigh.weight", "weigh.bias"} <= gradients.keys()  # the shared layer is on all stages
