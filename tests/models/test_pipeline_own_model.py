"""A user's own model cut into stages: modules beside its layers are placed where they are used."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.mesh import ProcessMesh
from weft.models import ParallelPlan, PipelinePlan, forward_backward, parallelize

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import MICROBATCHES, SCHEDULES, batch


class Residual(nn.Module):
    """A user's own model: layers that return pairs, a table that all layers read, and a table derived from it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 8)
        self.side = nn.Embedding(16, 8)
        self.bias = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.head = nn.Linear(8, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x, side = self.table(tokens) + self.bias, self.side(torch.arange(tokens.shape[1], device=tokens.device))
        seen = None
        for block in self.blocks:
            x, seen = block(x, side=side * 2, seen=seen)
        return self.head(x + seen)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, side: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        seen = x if seen is None else seen + x
        return x + torch.tanh(self.layer(x + side)), seen


def own_model(axes: dict[str, int] | None, pipeline: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Residual()
    criterion = partial(flat, nn.functional.cross_entropy)
    if axes:
        plan = ParallelPlan(pipeline=PipelinePlan(microbatches=MICROBATCHES, **pipeline))
        parallelize(model, ProcessMesh.grid(**axes), plan)
    loss = forward_backward(model, criterion, *batch())
    return {"loss": loss.item(), "gradients": {name: whole(p.grad) for name, p in model.named_parameters()}}


def flat(criterion: Any, logits: Tensor, targets: Tensor) -> Tensor:
    return criterion(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_paddlenlp_9412_what_is_beside_the_layers_goes_by_data_flow(pipeline: dict[str, Any], pool) -> None:
    alone = own_model(None, {})
    first, last = pool.run(own_model, {"pp": 2}, {"split": ("blocks.1",)} if len(pipeline) == 0 else pipeline, ranks=2)
    for found in (first, last):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert "side.weight" in found["gradients"]  # all layers read it
        assert not gradients_off(found["gradients"], alone["gradients"])
    first, last = first["gradients"].keys(), last["gradients"].keys()
    assert {"table.weight", "bias"} <= first - last
    assert {"head.weight", "head.bias"} <= last - first
