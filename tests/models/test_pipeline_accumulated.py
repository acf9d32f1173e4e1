"""Pipeline steps that accumulate gradients: a step sums its own addends over stages, and keeps earlier gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, forward_backward, parallelize
from weft.models.step.find_gradients import clip_gradients
from weft.reshard import GradientSync

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import MICROBATCHES, batch, make

Gradients = dict[str, Tensor]


def gradients_of(model: nn.Module) -> Gradients:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def clip(model: nn.Module) -> None:
    clip_gradients(model, 0.1)


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def zero_one(model: nn.Module) -> None:
    """Only the tied weight's gradient is given up."""
    for name, parameter in model.named_parameters():
        if name == "embed_tokens.weight":
            parameter.grad = None


BETWEEN = {
    "nothing": lambda model: None,
    "clipped": clip,
    "halved": halve,
    "zeroed-in-place": lambda model: model.zero_grad(set_to_none=False),
    "given-up": lambda model: model.zero_grad(),
    "one-given-up": zero_one,
}


def steps(axes: Mapping[str, int], zero: int, schedule: Any, between: str, own_sync: bool) -> list[Gradients]:
    """The gradients after each of three steps; `between` is done between the steps."""
    model = make("tied", 2)
    if axes:
        pipeline = PipelinePlan(schedule=schedule, microbatches=MICROBATCHES)
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), zero=zero, pipeline=pipeline))
    sync = GradientSync(model) if own_sync else None
    found = []
    for number in range(3):
        tokens, targets = (each.roll(number, 0) for each in batch())
        forward_backward(model, cross_entropy, tokens, targets, microbatches=MICROBATCHES, sync=sync)
        found.append(gradients_of(model))
        BETWEEN[between](model)
    return found


@functools.cache
def alone(between: str) -> list[Gradients]:
    return steps({}, 0, "1f1b", between, False)


def each_way(axes: Mapping[str, int], zero: int, schedule: Any, own_sync: bool) -> dict[str, list[Gradients]]:
    return {between: steps(axes, zero, schedule, between, own_sync) for between in BETWEEN}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "zero", "schedule", "own_sync"),
    [
        pytest.param({"pp": 2}, 0, "1f1b", False, id="pp2"),
        pytest.param({"pp": 2}, 0, "zero_bubble", True, id="pp2-zero-bubble"),
        pytest.param({"pp": 2, "dp": 2}, 0, "1f1b", True, id="pp2-dp2", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "dp": 2}, 1, "1f1b", False, id="pp2-dp2-zero1", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "dp": 2}, 3, "1f1b", False, id="pp2-dp2-zero3"),
        pytest.param({"pp": 2, "tp": 2}, 0, "1f1b", False, id="pp2-tp2", marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_of_several_steps_add_up(
    axes: dict[str, int], zero: int, schedule: Any, own_sync: bool, pool: Any
) -> None:
    for rank, found in enumerate(
        pool.run(each_way, axes, zero, schedule, own_sync, ranks=ProcessMesh.grid(**axes).size)
    ):
        for between, after in found.items():
            for number, (gradients, truth) in enumerate(zip(after, alone(between), strict=True)):
                off = gradients_off(gradients, {name: truth[name] for name in gradients})
                assert not off, (rank, between, number, off)


def given_beforehand() -> list[Tensor]:
    """The program has put a gradient into `.grad` itself; the tied weight's `.grad` is the same tensor after a step."""
    model = make("tied", 2)
    parallelize(
        model,
        ProcessMesh.grid(pp=2),
        replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=MICROBATCHES)),
    )
    weight = model.get_parameter("embed_tokens.weight")
    found = []
    for before in (None, torch.ones_like(weight.detach())):
        weight.grad = before
        forward_backward(model, cross_entropy, *batch())
        found.append((weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad).clone())
    return found


def test_gradients_from_before_a_step_are_counted_once(pool: Any) -> None:
    for without, with_ones in pool.run(given_beforehand, ranks=2):
        torch.testing.assert_close(with_ones, without + 1, rtol=1e-6, atol=1e-6)
