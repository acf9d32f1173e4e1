"""The memory of a step: followed on shapes, composed from few blocks, and equal to what a real step allocates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, ParallelPlan, PipelinePlan, initialize, parallelize, predict_memory
from weft.models.parallel.pipeline.cut import ranges_of
from weft.models.predict.memory import MIDDLE, compose, memory_parts, stage_peaks
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.step.live_storages import LiveStorages
from weft.models.step.record import StepShape
from weft.reshard import GradientSync

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=7, num_heads=4, num_kv_heads=4, max_seq_len=32
)
BATCH, MORE = (8, 32), pytest.mark.exhaustive


def make(**changes: Any) -> Llama:
    with torch.device("meta"):
        return Llama(replace(CONFIG, **changes))


def plan_of(**changes: Any) -> ParallelPlan:
    return replace(make().parallel_plan(), **changes)


PLANS = [
    pytest.param({"dp": 1}, {}, 1, None, id="alone"),
    pytest.param({"dp": 1}, {"recompute": "full"}, 4, 1.0, id="recompute-microbatches-clipping"),
    pytest.param({"dp": 4}, {}, 1, None, id="dp", marks=MORE),
    pytest.param({"dp": 4}, {"zero": 1, "recompute": "selective"}, 1, 1.0, id="zero1-selective", marks=MORE),
    pytest.param({"dp": 2}, {"zero": 2}, 4, 1.0, id="zero2-microbatches"),
    pytest.param({"dp": 4}, {"zero": 3}, 1, None, id="zero3"),
    pytest.param({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full", "sequence": True}, 1, None, id="zero3-tp"),
    pytest.param({"tp": 4}, {}, 1, None, id="tp", marks=MORE),
    pytest.param({"tp": 2}, {"sequence": True, "recompute": "selective"}, 1, None, id="tp-sequence", marks=MORE),
    pytest.param({"cp": 2, "dp": 2}, {"context": "all_gather"}, 1, None, id="cp"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("axes", "changes", "microbatches", "clip_norm"), PLANS)
def test_composed_memory_is_the_whole_steps(
    axes: dict[str, int], changes: dict[str, Any], microbatches: int, clip_norm: float | None, device: Any
) -> None:
    mesh, plan = ProcessMesh.grid(**axes), plan_of(**changes)
    shape = StepShape(batch=BATCH, microbatches=microbatches)
    parts = memory_parts(make(), mesh, plan, shape, clip_norm=clip_norm, device=device)
    composed = compose(parts, blocks=CONFIG.num_layers)
    whole = predict_memory(
        make(), mesh, plan, batch=BATCH, microbatches=microbatches, clip_norm=clip_norm, device=device
    )
    assert composed.nbytes == pytest.approx(whole.nbytes, rel=0.01)
    assert whole.peak is not None
    assert composed.phase == whole.peak.phase
    assert (composed.parameters, composed.states) == (whole.parameters, whole.states)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        pytest.param({"pp": 2, "tp": 2}, {}, id="tp"),
        pytest.param({"pp": 4, "dp": 2}, {"zero": 1}, id="dp-zero1", marks=MORE),
    ],
)
def test_composed_memory_of_stages(axes: dict[str, int], changes: dict[str, Any]) -> None:
    """Within 2 %: how many messages are on their way differs between stages by one or two."""
    model, mesh, microbatches = make(num_layers=8, hidden_size=64, vocab_size=256), ProcessMesh.grid(**axes), 8
    plan = plan_of(**changes, pipeline=PipelinePlan(microbatches=microbatches, schedule="1f1b"))
    assert plan.pipeline is not None
    schedule = plan.pipeline.make_schedule(axes["pp"])
    parts = memory_parts(model, mesh, plan, StepShape(batch=(16, 32), microbatches=microbatches))
    peaks = stage_peaks(parts, schedule, ranges_of(model, plan.pipeline, schedule)[1])
    for stage in (0, axes["pp"] - 1):
        rank = mesh.rank_at(**{**dict.fromkeys(mesh.axis_names, 0), "pp": stage})
        whole = predict_memory(model, mesh, plan, rank=rank, batch=(16, 32), microbatches=microbatches)
        assert peaks[stage].nbytes == pytest.approx(whole.nbytes, rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_microbatches_in_flight_share_the_casts_of_parameters(recompute: Any) -> None:
    """With few tokens, the casts of a stage's parameters are most of what is saved for backward."""
    model, mesh, microbatches = make(num_layers=8, hidden_size=128, vocab_size=256), ProcessMesh.grid(pp=2), 8
    plan = plan_of(recompute=recompute, pipeline=PipelinePlan(microbatches=microbatches, schedule="gpipe"))
    assert plan.pipeline is not None
    schedule, shape = plan.pipeline.make_schedule(2), StepShape(batch=(8, 8), microbatches=microbatches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        peaks = stage_peaks(
            memory_parts(model, mesh, plan, shape), schedule, ranges_of(model, plan.pipeline, schedule)[1]
        )
        for rank in range(2):
            whole = predict_memory(model, mesh, plan, rank=rank, batch=(8, 8), microbatches=microbatches)
            assert peaks[rank].nbytes == pytest.approx(whole.nbytes, rel=0.03)


def test_more_blocks_and_microbatches_hold_more() -> None:
    parts = memory_parts(make(), ProcessMesh.grid(dp=1), plan_of(), StepShape(batch=BATCH))
    sizes = [compose(parts, blocks=blocks).nbytes for blocks in (4, 8, 400)]
    growth = (sizes[1] - sizes[0]) / 4
    assert growth > 0
    assert sizes[2] - sizes[1] == pytest.approx(392 * growth)
    assert compose(parts, blocks=8, in_flight=3).activations > 2.5 * compose(parts, blocks=8).activations
    assert compose(parts, blocks=8, is_first=False, is_last=False).parameters < compose(parts, blocks=8).parameters
    assert compose(parts, blocks=8, is_first=False, is_last=False).place in (MIDDLE, 0, 7)


def test_a_model_without_blocks_that_are_alike_is_refused() -> None:
    with pytest.raises(ValueError, match="has 2 blocks, of which none stands for others"):
        memory_parts(make(num_layers=2), ProcessMesh.grid(dp=1), plan_of(), StepShape(batch=BATCH))


@pytest.mark.exhaustive
def test_a_schedule_that_delays_gradients_is_not_composed() -> None:
    model, plan = make(num_layers=8), plan_of(pipeline=PipelinePlan(microbatches=4, schedule="zero_bubble"))
    assert plan.pipeline is not None
    schedule = plan.pipeline.make_schedule(2)
    parts = memory_parts(model, ProcessMesh.grid(pp=2), plan, StepShape(batch=BATCH, microbatches=4))
    with pytest.raises(ValueError, match="zero_bubble"):
        stage_peaks(parts, schedule, ranges_of(model, plan.pipeline, schedule)[1])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_real_step_allocates_what_the_step_on_shapes_does(recompute: Any) -> None:
    """A real step's storages, followed by the same mode, with the ops' real choices on a CPU."""
    model, mesh = Llama(replace(CONFIG, hidden_size=64, num_layers=2)), ProcessMesh.grid(dp=1)
    initialize(model, seed=1)
    plan = replace(model.parallel_plan(), recompute=recompute)
    predicted = predict_memory(model, mesh, plan, batch=BATCH, states=0, device="cpu").peak
    parallelize(model, mesh, plan)
    sync, tokens = GradientSync(model), torch.arange(256).reshape(BATCH) % CONFIG.vocab_size
    parts = divide_batch(model, tokens, tokens, 1, {})

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, denominator=256.0)

    for _ in range(2):
        model.zero_grad()
        live = LiveStorages(list(model.blocks) if hasattr(model, "blocks") else [])
        live.adopt([*model.parameters(), *model.buffers()], "parameters")
        live.adopt([parts[0].args[0], parts[0].targets], "workspace")
        with live:
            find_gradients(model, criterion, parts, sync, after_phase=live.mark)
    assert predicted is not None
    assert max(live.bytes_at_moments()) == pytest.approx(predicted.nbytes, rel=0.01)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(partial(torch.optim.SGD, lr=0.1), id="no-states"),
        pytest.param(partial(torch.optim.SGD, lr=0.1, momentum=0.9), id="momentum"),
        pytest.param(torch.optim.AdamW, id="adamw"),
    ],
)
def test_a_given_optimizer_runs_on_shapes_and_has_the_states_of_a_real_step(make_optimizer: Any) -> None:
    model, mesh = Llama(replace(CONFIG, num_layers=2)), ProcessMesh.grid(dp=1)
    predicted = predict_memory(
        model, mesh, batch=BATCH, device="cpu", make_optimizer=lambda laid: make_optimizer(laid.parameters())
    )
    initialize(model, seed=1)
    optimizer, tokens = make_optimizer(model.parameters()), torch.arange(256).reshape(BATCH) % CONFIG.vocab_size
    cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    assert predicted.states == sum(each.nbytes for each in states)
    assert predicted.peak is not None


def test_storages_are_followed_until_they_are_freed() -> None:
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    live = LiveStorages()
    live.adopt(linear.parameters(), "parameters")
    with live:
        y = linear(x)
        z = y.view(4, 2)  # shares the memory of y
        del y
        held = live.bytes_at_moments()[-1]
        z.untyped_storage().resize_(0)
        emptied = live.bytes_at_moments()[-1]
        w = x + 1
        del w
    assert (held, emptied) == (64 + 32, 64)
    assert max(live.bytes_at_moments()) == 64 + 32
    assert live.bytes_at_moments(lambda each: each.kind == "parameters") == [64] * (live.now + 1)
