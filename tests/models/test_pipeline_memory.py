"""The memory of a pipeline's rank: predicted without processes, and measured on processes."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, ParallelPlan, PipelinePlan, initialize, parallelize
from weft.models.parallel.parallelize import pipeline_of
from weft.models.parallel.pipeline.run import stage_mesh_of
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.step.memory import predict_memory
from weft.reshard import GradientSync
from weft.reshard.training.gathered_modules import gathering_units

from tests.kernels.test_shared_casts import Casts
from tests.models.test_zero_numbers import held_by, held_since

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=4, max_seq_len=32
)
BATCH, MICROBATCHES = (16, 16), 4
READINGS = 3


def plan_of(zero: int, pipeline: dict[str, Any], recompute: str = "none") -> ParallelPlan:
    chosen = PipelinePlan(microbatches=MICROBATCHES, **pipeline)
    return replace(Llama(CONFIG).parallel_plan(), zero=zero, pipeline=chosen, recompute=recompute)


@patch("weft.kernels.dispatch.backend.PLAIN", frozenset())
# A GPU counts as short of memory, and the prediction is for a GPU.
@patch("weft.kernels.dispatch.backend.is_short_of_memory", lambda output: True)
def measured(
    axes: dict[str, int], plan: ParallelPlan, config: LlamaConfig, observers: tuple[int, ...]
) -> dict[str, int]:
    """Bytes on this rank in steps after the first: kept once all microbatches are back, and the activations' peak.

    observers: the ranks that measure. Reading the profiler's events takes most of the time.
    """
    observes = dist.get_rank() in observers
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, Tensor)}
    model = Llama(config)
    initialize(model, seed=3)
    parallelize(model, ProcessMesh.grid(**axes), plan)
    sync, optimizer = GradientSync(model, bucket_bytes=1024), torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.arange(BATCH[0] * BATCH[1]).reshape(BATCH) % CONFIG.vocab_size
    parts = divide_batch(model, tokens, tokens, MICROBATCHES, {})

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, denominator=float(tokens.numel()))

    # From the start: the profiler counts freed memory only if it saw the allocation.
    with profile(enabled=observes, profile_memory=True) as profiler:
        find_gradients(model, criterion, parts, sync)
        optimizer.step()
        optimizer.zero_grad()
        pipeline = pipeline_of(model)
        assert pipeline is not None
        actions: list[record_function] = []  # of the current reading
        stays: list[int] = []
        gradients: list[int] = []
        parameters: list[int] = []  # zero=3 keeps them whole from first use until all microbatches are back

        def begin(reading: int) -> None:
            actions.append(record_function(f"action {len(actions)}, {reading}"))
            actions[-1].__enter__()

        def after_phase(reading: int, phase: str) -> None:
            assert pipeline is not None
            pipeline.finish_sends()  # messages on their way are not counted
            actions[-1].__exit__(None, None, None)
            gradients.append(held_by([each.grad for each in model.parameters() if each.grad is not None]))
            parameters.append(held_of_parameters(model))
            if len(actions) == len(pipeline.ran) and plan.zero < 2:
                stays.append(held_since(before))  # gradients add up whole until all microbatches are back
            begin(reading)

        for reading in range(READINGS):
            optimizer.zero_grad()
            for each in (actions, stays, gradients, parameters):
                each.clear()
            parameters_before = held_of_parameters(model)
            begin(reading)
            find_gradients(model, criterion, parts, sync, after_phase=partial(after_phase, reading))
            actions[-1].__exit__(None, None, None)
    if not observes:
        return {}
    stays.append(held_since(before) + max(parameters) - held_of_parameters(model))
    seen = {each.name: each.cpu_memory_usage for each in profiler.function_events or ()}
    kept: dict[tuple[int, int], int] = {}
    most, before_it = 0, parameters_before
    after_each = map(sum, zip(gradients, parameters, strict=True))
    for number, (action, after_it) in enumerate(zip(pipeline.ran, after_each, strict=False)):
        key = action.stage, action.microbatch
        # Forwards and input gradients leave memory which, apart from parameters and their gradients, is kept until the
        # microbatch is back.
        if action.kind in "FI":
            # The least of the readings: memory that a gloo thread holds last is freed after the action.
            left = min(seen[f"action {number}, {reading}"] for reading in range(READINGS))
            kept[key] = kept.get(key, 0) + left - (after_it - before_it)
        else:
            del kept[key]
        before_it, most = after_it, max(most, sum(kept.values()))
    return {"stays": stays[0], "activations": most}


def held_of_parameters(model: nn.Module) -> int:
    """Bytes of the shards and of the gathered parameters."""
    full_parameters = (full.leaf for unit in gathering_units(model) for full in unit.full_parameters().values())
    return held_by([*model.parameters(), *full_parameters])


FIVE_LAYERS = replace(CONFIG, num_layers=5)
FEW, MORE = {"pp": 2, "dp": 2}, pytest.mark.exhaustive


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "zero", "pipeline"),
    [
        pytest.param(FEW, 1, {"schedule": "1f1b"}, id="1f1b-zero1"),
        pytest.param(FEW, 0, {"schedule": "gpipe"}, id="gpipe-zero0", marks=MORE),
        pytest.param(FEW, 0, {"schedule": "zero_bubble"}, id="zero_bubble-zero0", marks=MORE),
        pytest.param(FEW, 2, {"schedule": "1f1b"}, id="1f1b-zero2", marks=MORE),
        pytest.param(FEW, 3, {"schedule": "1f1b"}, id="1f1b-zero3", marks=MORE),
        pytest.param(FEW, 3, {"schedule": "interleaved"}, id="interleaved-zero3", marks=MORE),
        pytest.param({"pp": 2, "tp": 2}, 0, {"schedule": "1f1b"}, id="tp2", marks=MORE),
        pytest.param({"pp": 4}, 0, {"schedule": "1f1b", "split": (1, 1, 2, 1)}, id="uneven", marks=MORE),
    ],
)
def test_a_rank_of_a_stage_holds_what_was_predicted(
    axes: dict[str, int], zero: int, pipeline: dict[str, Any], pool: Any
) -> None:
    plan, mesh = plan_of(zero, pipeline), ProcessMesh.grid(**axes)
    config = FIVE_LAYERS if "split" in pipeline or pipeline["schedule"] == "interleaved" else CONFIG
    observers = tuple(stage_mesh_of(mesh, stage).ranks[0] for stage in range(axes["pp"]))
    measured_by = pool.run(measured, axes, plan, config, observers, ranks=4)
    for rank in observers:
        found, said = measured_by[rank], predict_memory(Llama(config), mesh, plan, rank=rank, batch=BATCH)
        assert found["stays"] == pytest.approx(said.between_steps, rel=0.05)
        assert found["activations"] == pytest.approx(said.activations, rel=0.05)


def test_no_level_holds_more_than_the_one_before() -> None:
    """With stages level 3 holds as much as level 2, until all microbatches are back."""
    mesh = ProcessMesh.grid(pp=2, dp=4)
    levels = [predict_memory(Llama(CONFIG), mesh, plan_of(zero, {"schedule": "1f1b"})) for zero in range(4)]
    first, second, third, fourth = (level.nbytes for level in levels)
    assert first > second > third == fourth
    assert levels[3].parameters + levels[3].gathered == levels[0].parameters  # nothing is held twice


@pytest.mark.exhaustive
def test_microbatches_in_flight_save_one_cast_of_each_weight() -> None:
    """Under autocast, the first stage holds the activations of two microbatches, and its weights in 16 bits once."""
    plan = plan_of(0, {"schedule": "1f1b"})
    with torch.device("meta"):
        model = Llama(replace(CONFIG, num_layers=4, hidden_size=64))
    block = sum(each.numel() for each in model.layers[0].parameters())

    def saved(rows: int) -> int:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            memory = predict_memory(
                model, ProcessMesh.grid(pp=2), plan, batch=(rows * MICROBATCHES, 1), microbatches=MICROBATCHES
            )
        return memory.activations

    weights = saved(1) - (saved(2) - saved(1))  # what does not grow with the rows
    assert weights <= 1.1 * 2 * 2 * block  # two blocks, two bytes


@pytest.mark.exhaustive
def test_blocks_that_run_again_share_no_casts() -> None:
    """Their graphs save no casts, and shared ones would stay in memory to the end of the step."""
    with torch.device("meta"):
        model = Llama(replace(CONFIG, num_layers=4))

    def casts(recompute: str) -> int:
        counting = Casts()
        with counting, torch.autocast("cpu", dtype=torch.bfloat16):
            plan = plan_of(0, {"schedule": "1f1b"}, recompute)
            predict_memory(model, ProcessMesh.grid(pp=2), plan, batch=(MICROBATCHES, 8), microbatches=MICROBATCHES)
        return counting.count

    assert casts("full") > 2 * casts("none")
