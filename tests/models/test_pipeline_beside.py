"""Stages beside sharded parameters, frozen parameters, adapters, autocast and compiled blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    ParallelPlan,
    PipelinePlan,
    forward_backward,
    load_lora,
    lora,
    merge_lora,
    parallelize,
    record,
    save_lora,
)
from weft.reshard.training.gathered_modules import gathering_units

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import MICROBATCHES, batch, make
from tests.models.test_pipeline_own_model import Residual, flat

Gradients = dict[str, Tensor]


def on_mesh(
    model: nn.Module,
    axes: Mapping[str, int],
    plan: ParallelPlan | None = None,
    **pipeline: Any,
) -> nn.Module:
    """The model, cut where there are axes."""
    if not axes:
        return model
    plan = model.parallel_plan() if plan is None else plan
    cut = PipelinePlan(microbatches=MICROBATCHES, **pipeline)
    return parallelize(model, ProcessMesh.grid(**axes), replace(plan, pipeline=cut))


def gradients(model: nn.Module, criterion: Any = cross_entropy) -> Gradients:
    forward_backward(model, criterion, *batch(), microbatches=MICROBATCHES)
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: list[Gradients], truth: Gradients) -> None:
    """All gradients equal one process's, and each is on at least one rank."""
    for each in found:
        assert not gradients_off(each, truth)
    assert {name for each in found for name in each} == truth.keys()


PARTS = 2  # microbatches where steps are recorded


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("zero", "bucket_bytes", "times"),
    [
        pytest.param(0, 2**30, 2, id="zero0"),
        pytest.param(1, 2**30, 2, id="zero1"),
        pytest.param(2, 2**30, 2, id="zero2"),
        pytest.param(2, 1, 1 + PARTS, id="zero2-small-buckets"),
        pytest.param(3, 2**30, 2, id="zero3"),
        pytest.param(3, 1, 1 + PARTS, id="zero3-small-buckets"),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_bytes_over_dp_in_a_step(schedule: Any, zero: Any, bucket_bytes: int, times: int) -> None:
    """Parameters are gathered once for any number of microbatches; gradients are scattered when a bucket is full."""
    model, n = make("llama", 2), 4
    for rank, held in ((0, ("embed_tokens", "layers.0")), (n, ("layers.1", "norm", "lm_head"))):
        P = sum(p.numel() for name, p in model.named_parameters() if name.startswith(held))
        cut = PipelinePlan(microbatches=PARTS, schedule=schedule)
        plan = replace(model.parallel_plan(), zero=zero, pipeline=cut)
        found = record(model, ProcessMesh.grid(pp=2, dp=n), plan, batch=(8, 8), rank=rank, bucket_bytes=bucket_bytes)
        together = 0  # norm gradients of both microbatches, which precede the deferred products
        if rank == n and schedule == "zero_bubble" and times > 2:
            together = sum(
                p.numel() for name, p in model.named_parameters() if name.startswith(held) and "norm" in name
            )
        losses = 0 if rank == 0 else -(-2 * (n - 1) // n) * 4
        assert found.select(axis="dp").nbytes - losses == (n - 1) * (times * P - together) * 4 // n


def held_after_a_step() -> tuple[int, int]:
    """Bytes of whole parameters, and how many there are."""
    model = make("llama", 2)
    on_mesh(model, {"pp": 2, "dp": 2}, replace(model.parallel_plan(), zero=3))
    forward_backward(model, cross_entropy, *batch())
    full_parameters = {each for unit in gathering_units(model) for each in unit.full_parameters().values()}
    return sum(each.leaf.to_local().untyped_storage().nbytes() for each in full_parameters), len(full_parameters)


@pytest.mark.exhaustive
def test_between_steps_shards_alone_are_held(pool: Any) -> None:
    for nbytes, count in pool.run(held_after_a_step, ranks=4):
        assert nbytes == 0
        assert count > 9  # a layer of nine, and an end


def frozen(trained: str, axes: dict[str, int], schedule: Any) -> Gradients:
    torch.manual_seed(5)
    model = Residual()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    on_mesh(model, axes, ParallelPlan(), schedule=schedule)
    return gradients(model, partial(flat, nn.functional.cross_entropy))


@pytest.mark.parametrize("trained", ["table", "blocks.3", "head"], ids=["first", "last-layer", "head"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_frozen_stage_passes_gradients_through(schedule: str, trained: str, pool: Any) -> None:
    assert_same(pool.run(frozen, trained, {"pp": 3}, schedule, ranks=3), frozen(trained, {}, schedule))


LAYERS = 4  # of the models with adapters
TARGETS = ["layers.*.self_attn.q_proj", "layers.*.mlp.down_proj"]


def adapted(axes: dict[str, int], folder: str) -> Gradients:
    """The adapters' gradients, after one step has changed the adapters."""
    model = lora(make("llama", LAYERS), rank=2, alpha=4.0, targets=TARGETS, seed=1)
    on_mesh(model, axes)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    if axes:
        save_lora(model, folder)
        with pytest.raises(ValueError, match="merge_lora: the model is cut into stages"):
            merge_lora(model)
    return gradients(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [pytest.param({"pp": 2}, id="pp2"), pytest.param({"pp": 2, "tp": 2}, id="pp2-tp2", marks=pytest.mark.exhaustive)],
)
def test_adapters_are_cut_with_their_layers(axes: dict[str, int], pool: Any, tmp_path: Path) -> None:
    truth = adapted({}, "")
    assert len(truth) == 2 * 2 * LAYERS
    folder = tmp_path / "adapters"
    assert_same(pool.run(adapted, axes, str(folder), ranks=ProcessMesh.grid(**axes).size), truth)
    read = load_lora(make("llama", LAYERS), folder)
    assert not gradients_off(gradients(read), truth)


def compiled(axes: dict[str, int], schedule: str) -> Gradients:
    torch.compiler.reset()
    model = on_mesh(make("llama"), axes, schedule=schedule)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return gradients(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_blocks_of_stages_compile(schedule: str, pool: Any) -> None:
    assert_same(pool.run(compiled, {"pp": 2}, schedule, ranks=2), gradients(make("llama")))


def in_bfloat16(axes: dict[str, int]) -> Gradients:
    model = on_mesh(make("llama"), axes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gradients(model)


@pytest.mark.exhaustive
def test_stages_under_autocast(pool: Any) -> None:
    """Stages exchange the tensors that one process would pass on: gradients agree to the rounding of float32."""
    assert_same(pool.run(in_bfloat16, {"pp": 2}, ranks=2), in_bfloat16({}))
