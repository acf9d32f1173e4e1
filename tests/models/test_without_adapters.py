"""`without_adapters`: within the context a model with adapters has the bits of its base, on every mesh."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, forward_backward, lay_out_batch, lora, parallelize, without_adapters

from tests.models import test_experts_axis as axis
from tests.models.cases import whole
from tests.models.test_experts_parallel import make as make_mixture
from tests.models.test_lora import ALPHA, RANK, TARGETS, batch, make, make_gpt, stirred
from tests.models.test_lora_experts import ALL, with_values

PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "zero3": ({"dp": 2}, {"zero": 3}),
    "tp": ({"tp": 2}, {"sequence": True}),
    "cp": ({"cp": 2}, {"context": "all_gather"}),
    "full": ({"dp": 2, "tp": 2}, {"recompute": "full"}),
    "selective": ({"tp": 2}, {"recompute": "selective"}),
    "pp": ({"pp": 2}, {"pipeline": PipelinePlan(microbatches=1), "recompute": "full"}),
}


def forward(model: nn.Module, mesh: ProcessMesh | None, plan: Any) -> Tensor | None:
    """The logits, or on the stages of a pipeline the loss; None on the other stages."""
    tokens, targets = batch()
    if plan is not None and plan.pipeline is not None:
        with torch.no_grad():
            return forward_backward(model, cross_entropy, tokens, targets)
    if mesh is None:
        return model(tokens)
    laid = lay_out_batch(mesh, plan, tokens)
    return whole(model(laid.tokens, positions=laid.positions))


def compared(case: str) -> list[bool]:
    """Whether the base's output is found: without adapters; beside them not; and after the context not."""
    axes, changes = PLANS[case]
    mesh = ProcessMesh.grid(**axes)
    plan = replace(make().parallel_plan(), **changes)
    base = parallelize(make(), mesh, plan)
    adapted = parallelize(stirred(lora(make(), RANK, ALPHA, [*TARGETS, "*_proj"])), mesh, plan)
    if "pp" in axes:
        base.requires_grad_(False)
    expected, before = forward(base, mesh, plan), forward(adapted, mesh, plan)
    with without_adapters(adapted):
        found = forward(adapted, mesh, plan)
    after = forward(adapted, mesh, plan)
    if expected is None:
        return [True, False, True]
    return [torch.equal(found, expected), torch.equal(before, expected), torch.equal(after, before)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PLANS)
def test_the_bits_are_the_bases(case: str, pool: Any) -> None:
    for found in pool.run(compared, case, ranks=math.prod(PLANS[case][0].values())):
        assert found == [True, False, True]


@pytest.mark.parametrize(
    ("make_base", "targets"),
    [
        pytest.param(make, ["*_proj"], id="llama"),
        pytest.param(make_gpt, ["*_proj", "c_fc"], id="gpt"),
    ],
)
def test_on_one_process_with_nested_contexts_and_after_an_error(make_base: Any, targets: list[str]) -> None:
    base, adapted = make_base(), stirred(lora(make_base(), RANK, ALPHA, targets))
    tokens, _ = batch()
    expected, with_adapters = base(tokens), adapted(tokens)
    with without_adapters(adapted):
        with without_adapters(adapted):
            assert torch.equal(adapted(tokens), expected)
        assert torch.equal(adapted(tokens), expected)
    assert torch.equal(adapted(tokens), with_adapters)
    with pytest.raises(KeyError), without_adapters(adapted):
        raise KeyError
    assert torch.equal(adapted(tokens), with_adapters)
    with pytest.raises(ValueError, match="has no adapters"), without_adapters(base):
        pass


def of_experts(case: str | None) -> list[bool]:
    def outputs(adapt: bool) -> list[Tensor]:
        model = make_mixture(axis.FAMILIES["qwen3-moe"])
        if adapt:
            lora(model, RANK, ALPHA, ALL)
        mesh = None if case is None else ProcessMesh.grid(dp=2)
        plan = axis.plan_of(model, 2, {"tokens": case}) if mesh is not None else None
        if mesh is not None:
            parallelize(model, mesh, plan)
        if not adapt:
            return [forward(model, mesh, plan)]
        with_values(model)
        with without_adapters(model):
            found = forward(model, mesh, plan)
        return [found, forward(model, mesh, plan)]

    (expected,), (found, adapted) = outputs(False), outputs(True)
    return [torch.equal(found, expected), torch.equal(adapted, expected)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [None, "exchange"])
def test_adapters_of_experts(case: str | None, pool: Any) -> None:
    assert all(found == [True, False] for found in pool.run(of_experts, case, ranks=1 if case is None else 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["base", "adapted"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled_blocks(recompute: Any, first: str) -> None:
    """A graph with the adapters and a graph without, whichever is compiled first."""
    torch._dynamo.reset()
    tokens, _ = batch()
    mesh = ProcessMesh.grid(dp=1)
    expected = {"base": make()(tokens), "adapted": stirred(lora(make(), RANK, ALPHA, TARGETS))(tokens)}
    model = stirred(lora(make(), RANK, ALPHA, TARGETS))
    parallelize(model, mesh, replace(model.parallel_plan(), recompute=recompute))
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for way in (first, *({"base", "adapted"} - {first}), first):
        if way == "base":
            with without_adapters(model):
                found = model(tokens)
        else:
            found = model(tokens)
        torch.testing.assert_close(found, expected[way], rtol=1e-5, atol=1e-6)
