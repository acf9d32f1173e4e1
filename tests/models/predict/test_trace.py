"""`trace_step` against the whole step on shapes: the same collectives, operations and bytes, from three blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import GPT, GPTConfig, Llama, LlamaConfig, ParallelPlan, PipelinePlan, Qwen, QwenConfig
from weft.models.predict import observer
from weft.models.predict.events import Compute, Start, Trace, Wait
from weft.models.predict.timeline import time_step
from weft.models.predict.trace import Reduced, trace_step
from weft.models.step import live_storages
from weft.models.step.alike import Representative, block_names, choose_representatives, copy_blocks
from weft.models.step.communication import Communication
from weft.models.step.followed_step import Peak
from weft.models.step.memory import predict_memory
from weft.models.step.record import StepShape, run_on_shapes
from weft.models.train.measure import flops_per_token
from weft.reshard.extension import add_dtensors
from weft.reshard.world import recording

from tests.models.predict.traces import TOY

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_layers": 8, "num_heads": 4, "max_seq_len": 32}
ROTARY = {**SIZES, "num_kv_heads": 2, "intermediate_size": 128}
# Gathers and sums take a fifth of the step.
SLOW_LINKS = replace(TOY, levels=tuple(replace(each, bandwidth=each.bandwidth / 5) for each in TOY.levels))
MODELS = {
    "llama": lambda **sizes: Llama(LlamaConfig(**ROTARY | sizes)),
    "qwen3": lambda **sizes: Qwen(QwenConfig(version=3, head_dim=16, **ROTARY | sizes)),
    "gpt": lambda **sizes: GPT(GPTConfig(**SIZES | sizes)),
}


def make(family: str, **sizes: Any) -> Any:
    with torch.device("meta"):
        return MODELS[family](**sizes)


def collectives(trace: Trace) -> Counter[tuple[str, tuple[str, ...]]]:
    """Kind and axes -> bytes received in the whole step."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for segment in trace.segments:
        for event in segment.events:
            if isinstance(event, Start):
                found[event.kind, event.axes] += event.nbytes * trace.count(segment)
    return found


def recorded(communication: Communication) -> Counter[tuple[str, tuple[str, ...]]]:
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for entry in communication.entries:
        found[entry.kind, entry.axes] += entry.nbytes
    return found


PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one process": ({"dp": 1}, {}),
    "dp": ({"dp": 4}, {}),
    "zero 1": ({"dp": 4}, {"zero": 1}),
    "zero 3": ({"dp": 4}, {"zero": 3}),
    "tp": ({"dp": 2, "tp": 2}, {}),
    "sequence": ({"dp": 2, "tp": 2}, {"sequence": True, "zero": 2}),
    "cp": ({"dp": 2, "cp": 2}, {"context": "all_gather"}),
    "ulysses": ({"dp": 2, "cp": 2}, {"context": "ulysses", "zero": 3}),
    "full": ({"dp": 2, "tp": 2}, {"recompute": "full", "zero": 3}),
    "selective": ({"dp": 2, "tp": 2}, {"recompute": "selective", "sequence": True}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_blocks_that_run_stand_for_all(family: str, plan: str, microbatches: int) -> None:
    axes, options = PLANS[plan]
    model, mesh = make(family), ProcessMesh.grid(**axes)
    shape = StepShape(batch=(16, 32), microbatches=microbatches)
    own = replace(model.parallel_plan(), **options)
    trace = trace_step(model, mesh, own, shape, clip_norm=1.0)
    whole = recorded(run_on_shapes(model, mesh, own, shape, clip_norm=1.0).communication)
    found = collectives(trace)
    assert found.keys() == whole.keys()
    for each, nbytes in whole.items():
        # The last bucket, in the phase "gradients", ends where the step ends, and is not a block's.
        summed = set(each[1]) & {"dp", "cp"} or (each[0] == "all-reduce" and options.get("sequence"))
        assert found[each] == (pytest.approx(nbytes, rel=0.1) if summed else nbytes), each
    assert trace.num_blocks == 8
    assert sum(len(each.blocks) for each in trace.select(phase="forward", microbatch=0)) == 8


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_blocks_that_run_take_the_time_of_all(zero: Any, microbatches: int) -> None:
    """Gathers and sums begin ahead of time, and end beside other blocks: each wait is as long as with all blocks."""
    model, mesh = make("llama"), ProcessMesh.grid(dp=16)
    own, shape = replace(model.parallel_plan(), zero=zero), StepShape(batch=(64, 32), microbatches=microbatches)
    names = block_names(model, own)
    every = [Representative(number, (number,)) for number in range(len(names))]
    all_blocks = Reduced(copy_blocks(model, names, range(len(names))), names, every)
    seconds = [
        time_step(trace_step(model, mesh, own, shape, clip_norm=1.0, reduced=reduced), SLOW_LINKS, world=16).seconds
        for reduced in (None, all_blocks)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.002)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2, "tp": 2}])
def test_operations_are_those_of_the_model(family: str, axes: dict[str, int]) -> None:
    model, mesh = make(family, num_layers=7), ProcessMesh.grid(**axes)
    trace = trace_step(model, mesh, model.parallel_plan(), StepShape(batch=(8, 32), microbatches=2))
    flops = sum(
        each.flops * trace.count(segment)
        for segment in trace.segments
        for each in segment.events
        if isinstance(each, Compute) and each.kind == "product"
    )
    norms = sum(each.numel() for each in model.parameters() if each.ndim == 1)
    products = flops_per_token(model.config, 0) - 6 * norms  # without attention
    assert flops == products * 8 * 32 // mesh.size


def test_attention_counts_seen_pairs() -> None:
    model = make("llama", num_layers=1)
    trace = trace_step(model, ProcessMesh.grid(dp=1), model.parallel_plan(), StepShape(batch=(2, 32)))
    found = [
        each
        for segment in trace.segments
        for each in segment.events
        if isinstance(each, Compute) and each.kind == "attention"
    ]
    pairs = 2 * 32 * 33 // 2  # of two rows: token i sees i + 1
    assert [(each.part, each.flops, each.sizes) for each in found] == [
        ("forward", 4 * pairs * 4 * 16, ((2, 4, 2, 32, 32, 16),)),
        ("backward", 10 * pairs * 4 * 16, ((2, 4, 2, 32, 32, 16),)),
    ]


@pytest.mark.exhaustive
def test_every_wait_has_a_start_before() -> None:
    model = make("llama")
    plan = replace(model.parallel_plan(), zero=3, sequence=True)
    trace = trace_step(model, ProcessMesh.grid(dp=2, tp=2), plan, StepShape(batch=(8, 32)), clip_norm=1.0)
    started: set[int] = set()
    for segment in trace.segments:
        for event in segment.events:
            if isinstance(event, Start):
                started.add(event.number)
            elif isinstance(event, Wait):
                assert event.number in started
                started.remove(event.number)
    assert not started


@pytest.mark.exhaustive
def test_a_stage_gathers_its_parameters_and_sums_gradients_after_its_backwards() -> None:
    model = make("llama")
    plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=4), zero=1)
    trace = trace_step(model, ProcessMesh.grid(pp=2, dp=4), plan, StepShape(batch=(16, 32), microbatches=4))
    assert trace.times == (1, 2, 1)
    by_phase = {
        phase: [each for part in trace.select(phase=phase) for each in part.events if isinstance(each, Start)]
        for phase in ("forward", "backward", "gradients")
    }
    assert not [each for each in by_phase["backward"] if each.kind == "reduce-scatter"]
    assert [each for each in by_phase["gradients"] if each.kind == "reduce-scatter"]
    gathers = [
        (each.blocks, [event.nbytes for event in each.events if isinstance(event, Start)])
        for each in trace.select(phase="forward", microbatch=0)
    ]
    of_blocks = {blocks: nbytes for blocks, nbytes in gathers if blocks and nbytes}
    assert {len(nbytes) for nbytes in of_blocks.values()} == {1} and len({*map(tuple, of_blocks.values())}) == 1
    (of_block,) = of_blocks[0,]
    assert of_block == 3 * sum(each.numel() * 4 for each in model.layers[0].parameters()) // 4
    assert trace.message_bytes == 16 // 4 // 4 * 32 * 64 * 4


def test_user_modules_without_a_list_of_blocks_run_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    trace = trace_step(
        model,
        ProcessMesh.grid(dp=2),
        ParallelPlan(),
        StepShape(
            batch=(torch.empty(4, 8), torch.empty(4, 4)), criterion=lambda y, t: torch.nn.functional.mse_loss(y, t)
        ),
    )
    assert trace.num_blocks == 0
    flops = sum(
        each.flops
        for part in trace.segments
        for each in part.events
        if isinstance(each, Compute) and each.kind == "product"
    )
    assert flops == 2 * 2 * (8 * 16 * 2 + 16 * 4 * 3)  # two rows; the input has no gradient


@pytest.mark.parametrize(
    ("signatures", "ahead", "numbers"),
    [
        ("", 1, []),
        ("a", 1, [0]),
        ("aaa", 1, [0, 1, 2]),
        ("aaaa", 1, [0, 1, 3]),
        ("aaaaa", 2, [0, 1, 2, 3, 4]),
        ("aaaaaaaa", 2, [0, 1, 2, 6, 7]),
        ("baaaaa", 1, [0, 1, 2, 5]),
        ("abababab", 1, [0, 1, 2, 3, 6, 7]),
        ("abababab", 2, [0, 1, 2, 3, 6, 7]),
        ("daaaabaaaabaaaabaaaab", 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 17, 18, 19, 20]),
    ],
)
def test_representatives(signatures: str, ahead: int, numbers: list[int]) -> None:
    representatives = choose_representatives(signatures, ahead)
    assert [each.number for each in representatives] == numbers
    assert sorted(block for each in representatives for block in each.blocks) == list(range(len(signatures)))
    for each in representatives:
        assert each.number in each.blocks
        assert {signatures[block] for block in each.blocks} == {signatures[each.number]}


@pytest.mark.parametrize(
    ("signatures", "numbers"),
    [("aa", [0, 1]), ("aaaa", [0, 1]), ("baaaa", [0, 1, 2]), ("abababab", [0, 1, 2, 3])],
)
def test_no_block_of_its_own_at_the_end(signatures: str, numbers: list[int]) -> None:
    representatives = choose_representatives(signatures, 1, behind=0)
    assert [each.number for each in representatives] == numbers
    assert sorted(block for each in representatives for block in each.blocks) == list(range(len(signatures)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, {"context": "all_gather", "sequence": True}, id="three-axes"),
        pytest.param({"dp": 2, "tp": 2}, {"zero": 1}, id="zero-1", marks=pytest.mark.exhaustive),
    ],
)
def test_sums_of_gradients_are_taken_as_by_dtensor(
    axes: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace, and the bytes of each moment, are the same where DTensor adds up itself."""
    model, mesh, shape = make("llama"), ProcessMesh.grid(**axes), StepShape(batch=(12, 32), microbatches=3)
    plan = replace(model.parallel_plan(), **options)

    def found() -> tuple[Trace, Peak | None]:
        peak = predict_memory(model, mesh, plan, batch=shape.batch, microbatches=shape.microbatches).peak
        return trace_step(model, mesh, plan, shape, clip_norm=1.0), peak

    taken: list[Any] = []

    def noted(mode: Any, func: Any, *arguments: Any) -> Any:
        result = add_dtensors(mode, func, *arguments)
        taken.extend([] if result is NotImplemented else [func])
        return result

    def refused(*arguments: Any) -> Any:
        return NotImplemented

    results = []
    for function in (noted, refused):
        for module in (observer, live_storages, recording):
            monkeypatch.setattr(module, "add_dtensors", function)
        results.append(found())
    assert results[0] == results[1]
    assert {torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor} == set(taken)
