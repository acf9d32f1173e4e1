"""The balance loss of each sequence: its formula, and equal values for any mesh and any number of microbatches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import ExpertPlan, PipelinePlan, RouterLosses, parallelize, record
from weft.models.experts import MixtureOfExperts
from weft.models.step.criterion import weight_criterion
from weft.models.step.forward_backward import divide_batch
from weft.models.train.digests import _by_microbatch
from weft.reshard import GradientSync

from tests.models.cases import ALLOWED, deviation
from tests.models.stepping import observed_microbatches
from tests.models.test_every_mesh import beside
from tests.models.test_experts_parallel import BALANCE, CONFIGS, ROWS, T, Z, batch, make

CRITERION = RouterLosses(cross_entropy, balance=BALANCE, z=Z)
FAMILIES: dict[str, Any] = {
    name: replace(CONFIGS[name], num_kv_heads=4, num_experts=8, seq_aux=True)
    for name in ("mixtral", "dense-first", "deepseek-router")
}
CASES: dict[str, tuple[dict[str, int], int, int, dict[str, Any]]] = {  # of the mesh, ep, microbatches, of the plan
    "microbatches": ({}, 1, 4, {}),
    "dp2": ({"dp": 2}, 1, 1, {}),
    "cp2": ({"cp": 2}, 1, 2, {"context": "all_gather"}),
    "tp2": ({"tp": 2}, 1, 1, {}),
    "tp2-sequence": ({"tp": 2}, 1, 2, {"sequence": True, "recompute": "full"}),
    "pp2-1f1b": ({"pp": 2}, 1, 4, {"pipeline": "1f1b"}),
    "dp2-cp2-ep4-zero3": ({"dp": 2, "cp": 2}, 4, 1, {"context": "ulysses", "zero": 3, "recompute": "selective"}),
    "pp2-dp2-ep2-1f1b": ({"pp": 2, "dp": 2}, 2, 4, {"pipeline": "1f1b"}),
    "pp2-cp2-ep2-zero-bubble": ({"pp": 2, "cp": 2}, 2, 4, {"pipeline": "zero_bubble", "context": "all_gather"}),
    "pp2-tp2-sequence-interleaved": ({"pp": 2, "tp": 2}, 1, 2, {"pipeline": "interleaved", "sequence": True}),
}
QUICK = ("microbatches", "tp2-sequence", "pp2-1f1b")


def step(model: Any, microbatches: int) -> tuple[Any, Any]:
    tokens, targets = batch()
    parts = divide_batch(model, tokens, targets, microbatches, {"router": True})
    return observed_microbatches(model, weight_criterion(CRITERION, parts, targets), parts, GradientSync(model))


def one_process(config: Any) -> tuple[float, float, dict[str, Tensor]]:
    """The loss, the balance loss and the gradients, in one microbatch."""
    model = make(config)
    found, _ = step(model, 1)
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return found.loss.item(), found.parts.balance.item(), gradients


def one_case(case: str, family: str, truth: tuple[float, float, dict[str, Tensor]]) -> list[str]:
    sizes, ep, microbatches, changes = CASES[case]
    loss, balance, gradients = truth
    mesh, model, wrong = ProcessMesh.grid(**sizes or {"dp": 1}), make(FAMILIES[family]), list[str]()
    changes = changes | {"experts": ExpertPlan(size=ep) if ep > 1 else None}
    if "pipeline" in changes:
        changes["pipeline"] = PipelinePlan(schedule=changes["pipeline"], microbatches=microbatches)
    plan = replace(model.parallel_plan(), **changes)
    recorded = record(
        make(FAMILIES[family]), mesh, plan, batch=(ROWS, T), rank=dist.get_rank(), microbatches=microbatches,
        criterion=CRITERION, inputs={"router": True},
    )  # fmt: skip
    parallelize(model, mesh, plan)
    found, issued = step(model, microbatches)
    if not recorded.predicts(issued):
        wrong.append(f"issued\n{issued}\nrecorded\n{recorded}")
    for name, mine, expected in (("loss", found.loss, loss), ("balance", found.parts.balance, balance)):
        if mine.item() != pytest.approx(expected, rel=1e-6):
            wrong.append(f"the {name} is {mine.item()}, and {expected} on one process")
    largest = max(each.abs().max().item() for each in gradients.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = gradients[name].abs().max().item()
            off = deviation(*beside(parameter.grad, gradients[name]), own, largest)
            if not off <= ALLOWED:
                wrong.append(f"the gradient of {name} is off by {off}")
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_any_mesh_and_any_number_of_microbatches_equal_one_process_with_one(case: str, family: str, pool: Any) -> None:
    ranks = 1
    for size in CASES[case][0].values():
        ranks *= size
    found = pool.run(one_case, case, family, one_process(FAMILIES[family]), ranks=ranks)
    assert not any(found), "\n".join(said for of_rank in found for said in of_rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_mean_over_sequences_and_layers(family: str) -> None:
    config, (tokens, targets) = FAMILIES[family], batch()
    logits: list[Tensor] = []
    model = make(config)
    layers = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
    chosen: list[Tensor] = []
    for layer in layers:
        layer.gate.register_forward_hook(lambda module, args, output: logits.append(output))
        layer.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    found = RouterLosses(cross_entropy, balance=1.0)(model(tokens, router=True), targets)
    E = config.num_experts
    each = []
    for scores, experts in zip(logits, chosen, strict=True):
        for row in range(ROWS):
            f = torch.bincount(experts[row].flatten(), minlength=E) / T
            each.append(E * (f * scores[row].softmax(-1).mean(0)).sum())
    expected = torch.stack(each).mean()
    assert len(each) == ROWS * len(layers)
    assert found.routers is not None
    assert found.routers.addends[0].item() == pytest.approx(expected.item(), rel=1e-6)
    total = cross_entropy(model(tokens), targets).detach() + expected.detach()
    assert found.loss.item() == pytest.approx(total.item(), rel=1e-6)


def test_a_single_sequence_has_the_loss_of_its_batch_and_several_have_not() -> None:
    config = replace(FAMILIES["mixtral"], num_layers=1)
    tokens, targets = batch()
    for rows in (1, ROWS):
        values, gradients = [], []
        for seq_aux in (False, True):
            model = make(replace(config, seq_aux=seq_aux))
            found = RouterLosses(cross_entropy, balance=1.0)(model(tokens[:rows], router=True), targets[:rows])
            found.loss.backward()
            assert found.routers is not None
            values.append(found.routers.addends[0].item())
            gradients.append(model.layers[0].mlp.gate.weight.grad)
        is_equal = rows == 1
        assert (abs(values[0] - values[1]) < 1e-6) == is_equal
        assert torch.allclose(*gradients, atol=1e-6) == is_equal


@pytest.mark.parametrize("seq_aux", [False, True])
def test_digests_name_a_balance_loss_that_depends_on_the_microbatches(seq_aux: bool) -> None:
    config = replace(FAMILIES["mixtral"], seq_aux=seq_aux)
    run: Any = SimpleNamespace(config=SimpleNamespace(model=config))
    assert _by_microbatch(make(config), run) == (() if seq_aux else ("the balance loss of routers",))
