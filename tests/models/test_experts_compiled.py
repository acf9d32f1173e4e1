"""Compiled blocks with experts over "ep": a graph before the experts and one after, and an eager step's values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import ExpertPlan, RouterLosses, forward_backward, parallelize

from tests.models.cases import whole
from tests.models.test_experts_axis import FAMILIES
from tests.models.test_experts_parallel import batch, make
from tests.support.pool import Pool

CONFIG = replace(FAMILIES["qwen3-moe"], num_layers=2)
CASES: dict[str, tuple[dict[str, int], ExpertPlan, dict[str, Any]]] = {
    "exchange": ({"dp": 2}, ExpertPlan(size=2, tokens="exchange"), {}),
    "gather-recomputed": ({"dp": 2}, ExpertPlan(size=2, tokens="gather"), {"recompute": "full"}),
    "zero3-selective": ({"dp": 4}, ExpertPlan(size=2, tokens="exchange"), {"zero": 3, "recompute": "selective"}),
    "over-tp": ({"dp": 2, "tp": 2}, ExpertPlan(size=4, over_tp=True, tokens="exchange"), {"sequence": True}),
}


def step(case: str, compiled: bool) -> tuple[float, dict[str, Tensor], int]:
    """The loss and the gradients of a second step, and the number of graphs."""
    sizes, experts, changes = CASES[case]
    torch.compiler.reset()
    counters.clear()
    model = make(CONFIG)
    parallelize(model, ProcessMesh.grid(**sizes), replace(model.parallel_plan(), experts=experts, **changes))
    for block in model.blocks if compiled else ():
        block.compile()
    criterion = RouterLosses(cross_entropy, balance=0.01, z=0.001)
    for _ in range(2):
        model.zero_grad()
        loss = forward_backward(model, criterion, *batch(), router=True)
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), gradients, counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_has_the_values_of_an_eager_one(case: str, pool: Pool) -> None:
    ranks = ProcessMesh.grid(**CASES[case][0]).size
    eager, compiled = (pool.run(step, case, each, ranks=ranks) for each in (False, True))
    for (loss, gradients, none), (found, own, graphs) in zip(eager, compiled, strict=True):
        assert none == 0 < graphs
        assert found == pytest.approx(loss, rel=1e-6)
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (own[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def whole_graphs() -> str:
    torch.compiler.reset()  # dynamo reuses what it compiled with graph breaks
    model = make(CONFIG)
    parallelize(model, ProcessMesh.grid(dp=2), replace(model.parallel_plan(), experts=ExpertPlan(size=2)))
    model.blocks[-1].compile(fullgraph=True)
    try:
        forward_backward(model, RouterLosses(cross_entropy), *batch(), router=True)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


@pytest.mark.exhaustive
def test_one_graph_of_a_block_is_refused_with_the_remedy(pool: Pool) -> None:
    for told in pool.run(whole_graphs, ranks=2):
        assert "compile the block without fullgraph" in told
