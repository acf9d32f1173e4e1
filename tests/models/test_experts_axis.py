"""Experts on a mesh of their own: layouts, losses and gradients on every kind of mesh, traffic, and errors."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, parallelize, record
from weft.models.step.find_gradients import clip_gradients
from weft.models.step.forward_backward import divide_batch
from weft.reshard import GradientSync

from tests.models.cases import ALLOWED, deviation
from tests.models.mixtures import batch, make, plan_of
from tests.models.stepping import observed_microbatches
from tests.models.test_every_mesh import beside

MICROBATCHES = 4


def rows_of(changes: dict[str, Any]) -> tuple[int, int]:
    return (3 * MICROBATCHES, MICROBATCHES) if changes.get("pipeline") else (5, 1)


@functools.cache
def alone(rows: int, count: int, layers: int) -> tuple[float, dict[str, Tensor], float]:
    """The loss, the gradients and their norm on one process."""
    model = make(layers=layers)
    found, _ = step(model, rows, count)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    return found.loss.item(), gradients, clip_gradients(model, 0).item()


def step(model: Any, rows: int, count: int) -> Any:
    tokens, targets = batch(rows)
    criterion = partial(cross_entropy, denominator=float(targets.numel()))
    parts = divide_batch(model, tokens, targets, count, {})
    return observed_microbatches(model, criterion, parts, GradientSync(model))


def layers_of(sizes: dict[str, int], changes: dict[str, Any]) -> int:
    pipeline = changes.get("pipeline")
    return 2 if pipeline is None else max(2, pipeline.make_schedule(sizes["pp"]).num_stages)


def one_case(sizes: dict[str, int], ep: int, changes: dict[str, Any], truth: Any, records: bool = True) -> list[str]:
    mesh, rank, wrong = ProcessMesh.grid(**sizes), dist.get_rank(), []
    rows, count = rows_of(changes)
    loss, gradients, norm = truth
    model = make(changes.get("sequence", False), layers_of(sizes, changes))
    plan = plan_of(model, ep, **changes)
    if records:
        criterion = partial(cross_entropy, denominator=float(rows * 11))
        recorded = record(model, mesh, plan, batch=(rows, 11), rank=rank, microbatches=count, criterion=criterion)
    parallelize(model, mesh, plan)
    found, issued = step(model, rows, count)
    if records and not recorded.predicts(issued):
        wrong.append(f"issued\n{issued}\nrecorded\n{recorded}")
    if not abs(found.loss.item() - loss) <= 1e-6 * loss:
        wrong.append(f"the loss is {found.loss.item()}, and {loss} on one process")
    largest = {name: each.abs().max().item() for name, each in gradients.items()}
    for name, parameter in model.named_parameters():
        off = deviation(*beside(parameter.grad, gradients[name]), largest[name], max(largest.values()))
        if not off <= ALLOWED:
            wrong.append(f"the gradient of {name} is off by {off} on rank {rank}")
    mine = clip_gradients(model, 0).item()
    if mine != pytest.approx(norm, rel=1e-5):
        wrong.append(f"the norm is {mine}, and {norm} on one process")
    return [f"{sizes} ep={ep} {changes}: {each}" for each in wrong]


def one_f_one_b(schedule: str = "1f1b") -> PipelinePlan:
    return PipelinePlan(schedule=schedule, microbatches=MICROBATCHES)  # type: ignore[arg-type]


CASES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "dp": ({"dp": 2}, 2, {}),
    "dp-some": ({"dp": 4}, 2, {}),
    "cp": ({"dp": 1, "cp": 2}, 2, {"context": "all_gather"}),
    "dp-cp": ({"dp": 2, "cp": 2}, 4, {"context": "ulysses"}),
    "dp-tp": ({"dp": 2, "tp": 2}, 2, {}),
    "dp-tp-sequence": ({"dp": 2, "tp": 2}, 2, {"sequence": True}),
    "over-tp": ({"dp": 2, "tp": 2}, 4, {"over_tp": True}),
    "over-tp-sequence": ({"dp": 2, "tp": 2}, 4, {"over_tp": True, "sequence": True}),
    "over-tp-part": ({"dp": 2, "tp": 2}, 2, {"over_tp": True}),
    "zero1": ({"dp": 4}, 2, {"zero": 1}),
    "zero2": ({"dp": 4}, 2, {"zero": 2}),
    "zero3": ({"dp": 4}, 2, {"zero": 3}),
    "zero3-tp": ({"dp": 4, "tp": 2}, 2, {"zero": 3, "sequence": True}),
    "full": ({"dp": 2}, 2, {"recompute": "full"}),
    "selective": ({"dp": 2}, 2, {"recompute": "selective"}),
    "zero3-full": ({"dp": 4}, 2, {"zero": 3, "recompute": "full"}),
    "pp-1f1b": ({"pp": 2, "dp": 2}, 2, {"pipeline": one_f_one_b()}),
    "pp-interleaved": ({"pp": 2, "dp": 2}, 2, {"pipeline": one_f_one_b("interleaved")}),
    "pp-zero-bubble": ({"pp": 2, "dp": 2}, 2, {"pipeline": one_f_one_b("zero_bubble")}),
    "pp-zero3": ({"pp": 2, "dp": 4}, 2, {"pipeline": one_f_one_b(), "zero": 3}),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("tokens", ["gather", "exchange"])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_norm_of_one_process(case: str, tokens: str, pool: Any) -> None:
    sizes, ep, changes = CASES[case]
    truth = alone(*rows_of(changes), layers_of(sizes, changes))
    found = pool.run(one_case, sizes, ep, {**changes, "tokens": tokens}, truth, ranks=math.prod(sizes.values()))
    assert not any(found), "\n".join(said for of_rank in found for said in of_rank)
