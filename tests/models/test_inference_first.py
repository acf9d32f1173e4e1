"""A model first called under `torch.inference_mode()` trains afterwards: no cached tensor was made in that mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import KeyValueCache, attention, cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import PipelinePlan, clip_gradients, forward_backward, generate, parallelize
from weft.models.step.find_gradients import find_loss
from weft.models.step.forward_backward import divide_batch
from weft.reshard import GradientSync, distribute, fixed_parameters, reshard

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import batch, make

Gradients = dict[str, Tensor]


def gradients_of(model: Any) -> Gradients:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def alone(name: str) -> Gradients:
    model = make(name, 2)
    forward_backward(model, cross_entropy, *batch())
    return gradients_of(model)


def evaluate(model: Any, mesh: ProcessMesh, *, samples: bool) -> None:
    """The loss or the output in inference mode, and a sample of tokens, which a pipeline cannot generate."""
    tokens = batch()[0]
    with torch.inference_mode():
        if "pp" in mesh.axis_names:
            find_loss(model, cross_entropy, divide_batch(model, *batch(), 2, {}))
            return
        with fixed_parameters(model):
            for _ in range(2):
                model(distribute(tokens, Layout(mesh, "dp: S(0)" if "dp" in mesh.axis_names else "")))
        if samples:
            generate(model, tokens[:, :4], max_new_tokens=3)


def evaluated_around_steps(name: str, axes: dict[str, int], plan: dict[str, Any]) -> tuple[Gradients, Gradients]:
    """Gradients of two steps, each between two evaluations."""
    model, mesh = make(name, 2), ProcessMesh.grid(**axes)
    parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    found = []
    for number in range(2):
        evaluate(model, mesh, samples=number > 0)
        forward_backward(model, cross_entropy, *batch(), microbatches=2)
        evaluate(model, mesh, samples=True)
        clip_gradients(model, 1e9)
        found.append(gradients_of(model))
        model.zero_grad()
    return found[0], found[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "axes", "plan"),
    [
        *[pytest.param("llama", {"dp": 2}, {"zero": zero}, id=f"zero{zero}") for zero in range(4)],
        pytest.param("gpt", {"dp": 2}, {"zero": 3, "regather": False}, id="zero3-kept"),
        pytest.param("qwen", {"tp": 2}, {"sequence": True}, id="tp-sequence"),
        pytest.param("llama", {"dp": 2}, {"zero": 3, "recompute": "full"}, id="zero3-recomputed"),
        pytest.param("tied", {"pp": 2}, {"pipeline": PipelinePlan(microbatches=2)}, id="pp-tied"),
        pytest.param("gpt", {"pp": 2}, {"pipeline": PipelinePlan(microbatches=2)}, id="pp-gpt"),
        pytest.param("llama", {"pp": 2, "dp": 2}, {"zero": 3, "pipeline": PipelinePlan(microbatches=2)}, id="pp-zero3"),
    ],
)
def test_a_model_trains_between_evaluations(name: str, axes: dict[str, int], plan: dict[str, Any], pool: Any) -> None:
    truth = alone(name)
    for steps in pool.run(evaluated_around_steps, name, axes, plan, ranks=ProcessMesh.grid(**axes).size):
        for found in steps:
            assert not gradients_off(found, {each: truth[each] for each in found})


def ahead_of_everything() -> None:
    """Meshes, their groups, and the layouts of tensors are first asked for in inference mode."""
    with torch.inference_mode():
        mesh = ProcessMesh.grid(dp=2)
        reshard(distribute(torch.ones(4, 4), Layout(mesh, "dp: S(0)")), placements=Layout(mesh))
        reshard(distribute(torch.ones(4, 4), Layout(mesh, "dp: P")), placements=Layout(mesh))
    model = torch.nn.ParameterList([torch.nn.Parameter(distribute(torch.ones(4), Layout(mesh)))])
    sync = GradientSync(model)
    x = distribute(torch.ones(4, 4), Layout(mesh, "dp: S(0)"))
    reshard((x * model[0]).sum()).backward()
    sync.wait()
    assert torch.equal(whole(model[0].grad), torch.full((4,), 4.0))


def test_meshes_that_are_first_asked_for_there(pool: Any) -> None:
    pool.run(ahead_of_everything, ranks=2)


@pytest.mark.parametrize("later", [torch.no_grad, torch.inference_mode])
def test_a_cache_of_keys_is_read_on_after(later: Any) -> None:
    parts = [torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    both = torch.cat(parts, 1)
    truth = attention(both, both, both, head_dim=4)[:, 3:]
    cache = KeyValueCache(6)
    with torch.inference_mode():
        attention(parts[0], parts[0], parts[0], head_dim=4, cache=cache)
    with later():
        found = attention(parts[1], parts[1], parts[1], head_dim=4, cache=cache)
    torch.testing.assert_close(found, truth)
