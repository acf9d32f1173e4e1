"""Under autocast a family errs as much on a mesh, under any plan, as on one process, with bfloat16 activations.

test_least_communication.py checks that activations are communicated in bfloat16.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import lay_out_batch, parallelize, record
from weft.models.parallel.pipeline.step import Microbatch
from weft.models.step.find_gradients import find_gradients
from weft.reshard import GradientSync

from tests.models.cases import whole
from tests.models.stepping import observed_step
from tests.models.test_every_mesh import FAMILIES, KEY, LENGTH, ROWS, batch, make

Found = dict[str, Tensor]
CRITERION = partial(cross_entropy, denominator=float(ROWS * LENGTH))
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tensor": ({"tp": 2}, {}),
    "sequence": ({"tp": 2}, {"sequence": True, "recompute": "selective"}),
    "sharded-parameters": ({"dp": 2, "tp": 2}, {"zero": 3, "sequence": True}),
    "all_gather-tensor": ({"cp": 2, "tp": 2}, {"context": "all_gather"}),
    "ulysses-sequence": ({"cp": 2, "tp": 2}, {"context": "ulysses", "sequence": True, "recompute": "full"}),
}


def lower() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@functools.cache
def alone(family: str, dtype: torch.dtype) -> Found:
    """In bfloat16 under autocast, or in float64."""
    model, (tokens, targets) = make(FAMILIES[family]), batch()
    options: dict[str, Any] = {"call_context": lower} if dtype == torch.bfloat16 else {}
    microbatch = Microbatch(args=(tokens,), kwargs={"dropout_key": KEY}, targets=targets)
    found = find_gradients(
        model.to(torch.float64 if not options else None), CRITERION, [microbatch], GradientSync(model), **options
    )
    return {"loss": found.loss} | {name: parameter.grad for name, parameter in model.named_parameters()}


def on_a_mesh(family: str, plan: str) -> Found:
    sizes, changes = PLANS[plan]
    mesh, model, inputs = ProcessMesh.grid(**sizes), make(FAMILIES[family]), {"dropout_key": KEY}
    own = replace(model.parallel_plan(), **changes)
    with lower():
        recorded = record(
            model,
            mesh,
            own,
            batch=(ROWS, LENGTH),
            rank=torch.distributed.get_rank(),
            inputs=inputs,
            criterion=CRITERION,
        )
    parallelize(model, mesh, own)
    laid = lay_out_batch(mesh, own, *batch())
    given = {"positions": laid.positions, **inputs}
    found, issued = observed_step(model, CRITERION, laid.tokens, laid.targets, inputs=given, call_context=lower)
    assert issued == recorded, f"issued\n{issued}\nrecorded\n{recorded}"
    return {"loss": whole(found.loss)} | {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def error(found: Found, truth: Found) -> float:
    """The norm of the error over all gradients together: the error of a single small gradient is chance."""
    return float(torch.stack([(found[name] - true).norm() for name, true in truth.items() if name != "loss"]).norm())


def table() -> list[Any]:
    quick = {("gpt", "tensor")}
    return [
        pytest.param(
            family, plan, id=f"{family}-{plan}", marks=[] if (family, plan) in quick else pytest.mark.exhaustive
        )
        for family in FAMILIES
        for plan in PLANS
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "plan"), table())
def test_a_mesh_errs_as_one_process_under_autocast(family: str, plan: str, pool: Any) -> None:
    truth, one = alone(family, torch.float64), alone(family, torch.bfloat16)
    sizes, _ = PLANS[plan]
    for found in pool.run(on_a_mesh, family, plan, ranks=math.prod(sizes.values())):
        assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(truth, torch.float32)
        assert float(found["loss"]) == pytest.approx(float(one["loss"]), rel=torch.finfo(torch.bfloat16).eps / 4)
        assert error(found, truth) <= 1.5 * error(one, truth)
