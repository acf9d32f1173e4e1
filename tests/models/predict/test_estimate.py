"""Estimates of whole steps: pipelines by their schedules, shares of the time, and pictures."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig
from weft.models.predict.chip import load_chip
from weft.models.predict.estimate import Estimate, estimate
from weft.models.predict.events import Compute, Segment, Trace
from weft.models.predict.pipeline_time import even_stages, split_weight_gradients, time_pipeline
from weft.models.predict.timeline import DEVICE, PARTS, time_step
from weft.models.predict.timeline_picture import timeline_json, timeline_svg
from weft.models.predict.trace import trace_step
from weft.models.schedules.pipeline_plan import PipelinePlan, make_schedule
from weft.models.schedules.schedule import Action, ScheduleName, bubble_formula, simulate
from weft.models.step.record import StepShape
from weft.models.train.measure import flops_per_token

from tests.models.predict.traces import NVLINK, TOY, device_seconds, memory, product, segment, start, trace, wait
from tests.support.limits import python_ratio

QUICK = replace(TOY, levels=(replace(NVLINK, latency=0.0), replace(TOY.levels[1], latency=0.0)))


def stage_trace(blocks: int, *, head: float = 0.0, message_bytes: int = 0, **after: Any) -> Trace:
    """A stage of all blocks, of which a forward takes 1 s and a backward 2 s for each block."""
    middle = range(1, blocks - 1)
    segments: list[Segment] = []
    for microbatch in (0, 1):
        for each in ((0,), middle, (blocks - 1,)):
            segments.append(segment(memory(1.0), microbatch=microbatch, blocks=each))
        if head:
            segments.append(segment(memory(head), microbatch=microbatch))
        for each in ((blocks - 1,), middle, (0,)):
            segments.append(segment(memory(2.0), phase="backward", microbatch=microbatch, blocks=each))
    for each in (range(blocks),):
        if "gradients" in after:
            number = 1000
            events = start(number, after["gradients"]), wait(number)
            segments.append(segment(*events, phase="gradients", microbatch=-1, blocks=each))
        if "optimizer" in after:
            event = memory(after["optimizer"], "optimizer", kind="optimizer")
            segments.append(segment(event, phase="optimizer", microbatch=-1, blocks=each))
    return trace(*segments, times=(7, 1), num_blocks=blocks, message_bytes=message_bytes)


def of_pipeline(
    step: Trace, name: ScheduleName = "1f1b", *, ranks: int = 4, microbatches: int = 8, chunks: int = 1
) -> Estimate:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return estimate(
        step, chip=QUICK, mesh_sizes={"pp": ranks, "tp": 8}, tokens=1, flops=1, schedule=schedule, keep_spans=True
    )


@pytest.mark.every_value
@pytest.mark.parametrize("microbatches", [4, 8, 20])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_bubble_of_equal_stages_is_the_formula(name: ScheduleName, chunks: int, microbatches: int) -> None:
    step = replace(stage_trace(8), times=(microbatches - 1, 1))
    result = of_pipeline(step, name, microbatches=microbatches, chunks=chunks)
    idle, slots = bubble_formula(name, ranks=4, microbatches=microbatches, chunks=chunks)
    assert result.share("bubble") == pytest.approx(idle / slots)
    assert result.seconds >= device_seconds(step, QUICK) / 4
    assert result.seconds == pytest.approx(microbatches * 2 * 3 / (1 - idle / slots))


def test_weight_gradients_fill_the_bubble_of_zero_bubble() -> None:
    tokens, features, outputs = 4096, 1024, 2048
    forward = product(tokens, outputs, features)
    sizes = ((1, tokens, features, outputs), (1, outputs, features, tokens))
    segments = [
        segment(forward, blocks=range(8)),
        segment(product(sizes=sizes, part="backward", num_launches=2), phase="backward", blocks=range(8)),
    ]
    step = trace(*segments, times=(1,), num_blocks=8)
    chip = replace(QUICK, memory_bandwidth=2e18, tiles=((128, 128),))
    schedule = make_schedule("zero_bubble", ranks=4, microbatches=8)
    result = estimate(step, chip=chip, mesh_sizes={"pp": 4}, tokens=1, flops=1, schedule=schedule)
    # Tiles: 512 in 4 waves; 256 in 2 waves of twice the K; 128 in one of four times.
    one, other, weights = 1024, 2048, 4096
    expected = {"F": 4 * one, "I": 2 * other, "W": 1 * weights, "B": 2 * other + weights}
    slots = simulate(schedule, lambda action: float(expected[action.kind]))
    assert result.share("bubble") == pytest.approx(slots.idle(0) / slots.length, rel=0.01)
    plain = make_schedule("1f1b", ranks=4, microbatches=8)
    assert estimate(step, chip=chip, mesh_sizes={"pp": 4}, tokens=1, flops=1, schedule=plain).seconds > result.seconds


def test_weight_gradients_are_products_that_sum_over_tokens() -> None:
    both = product(sizes=((1, 4096, 1024, 2048), (1, 2048, 1024, 4096)), part="backward", num_launches=3)
    inputs, weights = split_weight_gradients(both, {4096})
    assert isinstance(inputs, Compute) and isinstance(weights, Compute)
    assert (inputs.sizes, weights.sizes) == (both.sizes[:1], both.sizes[1:])
    assert inputs.flops + weights.flops == both.flops and inputs.nbytes + weights.nbytes == both.nbytes
    assert (inputs.num_launches, weights.num_launches) == (2, 1)
    square = product(sizes=((1, 512, 512, 512), (1, 512, 512, 512)), part="backward")
    inputs, weights = split_weight_gradients(square, {512})
    assert isinstance(weights, Compute) and weights.sizes == square.sizes[1:]
    alone = product(2048, 1024, 4096, part="backward", name="aten.mm")
    assert split_weight_gradients(alone, {4096}) == (None, alone)
    for event in (product(), memory(), start(0), replace(alone, part="recompute")):
        assert split_weight_gradients(event, {4096, 1024}) == (event, None)


def test_messages_delay_the_next_stage() -> None:
    # A message takes 0.5 s: 5 GB of a network of 10 GB/s. The first forward passes 3 of them, the last backward too.
    sizes = {"pp": 4, "tp": 8}
    schedule = make_schedule("gpipe", ranks=4, microbatches=8)
    step = stage_trace(8, message_bytes=5 * 10**9)
    result = estimate(step, chip=QUICK, mesh_sizes=sizes, tokens=1, flops=1, schedule=schedule)
    alone = of_pipeline(stage_trace(8), "gpipe")
    assert result.seconds == pytest.approx(alone.seconds + 6 * 0.5)
    assert result.parts["communication"] == pytest.approx(3.0)
    assert result.parts["bubble"] == pytest.approx(alone.parts["bubble"])


def test_uneven_stages_and_the_head_wait_for_the_slowest() -> None:
    assert even_stages(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 stages"):
        even_stages(3, 4)
    step, schedule = stage_trace(8, head=3.0), make_schedule("gpipe", ranks=4, microbatches=8)
    # Forwards: the last stage is the slowest, 2 + 3 s. Backwards: 4 s each.
    assert time_pipeline(step, QUICK, schedule).seconds == pytest.approx(3 * 2 + 8 * 5 + 8 * 4 + 3 * 4)
    uneven = time_pipeline(step, QUICK, schedule, stages=((0, 3), (3, 5), (5, 7), (7, 8)))
    assert uneven.seconds == pytest.approx(3 + 2 + 2 + 8 * 4 + 2 + 4 + 4 + 8 * 6)
    with pytest.raises(ValueError, match=r"stages are .*8 blocks must all be in one"):
        time_pipeline(step, QUICK, schedule, stages=((0, 3), (3, 5), (5, 7), (7, 9)))


def test_gradients_and_the_update_follow_the_last_action() -> None:
    bare = of_pipeline(stage_trace(8))
    result = of_pipeline(stage_trace(8, gradients=0.5, optimizer=0.25))
    # The first rank's last action ends last; its two blocks have a sum and an update each.
    assert result.seconds == pytest.approx(bare.seconds + 2 * 0.5 + 2 * 0.25)
    assert result.parts["communication"] == pytest.approx(1.0)
    assert result.parts["optimizer"] == pytest.approx(0.5)


def test_all_ranks_gather_their_parameters_at_once() -> None:
    bare = of_pipeline(stage_trace(8))
    step = stage_trace(8)
    gather = segment(start(500, 0.5, "dp", purpose="parameters"), wait(500), blocks=range(8))
    result = of_pipeline(replace(step, segments=(gather, *step.segments)))
    # Each rank gathers two blocks in a second; only the first rank's second delays the step.
    assert result.seconds == pytest.approx(bare.seconds + 1.0)
    assert result.parts["communication"] == pytest.approx(1.0)
    assert result.parts["bubble"] == pytest.approx(bare.parts["bubble"])
    gathers = [span for span in result.timeline.spans if span.name == "parameters"]
    assert [(span.stream, span.begin, span.end) for span in gathers] == [(f"pp={i}", 0.0, 1.0) for i in range(4)]


def test_a_run_in_several_nodes_has_distances_of_the_whole_mesh() -> None:
    # dp over 2 ranks beside tp = 4: in a node of 8 without stages, but 16 ranks apart where "pp" is between.
    step = stage_trace(8, gradients=0.0)
    segments = tuple(
        replace(
            each,
            events=tuple(
                replace(e, axes=("dp",), size=2, stride=4, nbytes=10**9) if hasattr(e, "stride") else e
                for e in each.events
            ),
        )
        for each in step.segments
    )
    step, schedule = replace(step, segments=segments), make_schedule("1f1b", ranks=4, microbatches=8)

    def communication(**sizes: int) -> float:
        result = estimate(step, chip=QUICK, mesh_sizes=sizes, tokens=1, flops=1, schedule=schedule)
        return result.parts["communication"]

    assert communication(pp=4, dp=2, tp=4) == pytest.approx(2 * 0.02)
    assert communication(dp=2, pp=4, tp=4) == pytest.approx(2 * 0.1)


def test_numbers_of_a_step() -> None:
    step = trace(segment(product(8192, 8192, 8192)))
    flops = 2 * 8192**3
    result = estimate(step, chip=QUICK, mesh_sizes={"dp": 4}, tokens=1000, flops=4 * flops)
    assert result.tokens_per_second == pytest.approx(1000 / result.seconds)
    assert result.mfu == pytest.approx(flops / result.seconds / 132e12)
    assert 0.9 < result.mfu < 1
    half = estimate(step, chip=QUICK, mesh_sizes={"dp": 4}, tokens=1, flops=4 * flops, dtype="float32")
    assert half.mfu == pytest.approx(2 * result.mfu)


def test_a_schedule_that_does_not_fit_the_mesh_is_an_error() -> None:
    step, schedule = stage_trace(8), make_schedule("1f1b", ranks=2, microbatches=8)
    with pytest.raises(ValueError, match="4 ranks along 'pp'; give the schedule"):
        estimate(step, chip=QUICK, mesh_sizes={"pp": 4}, tokens=1, flops=1)
    with pytest.raises(ValueError, match="'1f1b' has 2 ranks, and the mesh 4 along 'pp'"):
        estimate(step, chip=QUICK, mesh_sizes={"pp": 4}, tokens=1, flops=1, schedule=schedule)


@st.composite
def durations(draw: st.DrawFn) -> tuple[Any, dict[tuple[str, int], float]]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    ranks, chunks = draw(st.integers(1, 5)), 2 if name == "interleaved" else 1
    microbatches = ranks * draw(st.integers(1, 4))
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    seconds = st.floats(0.1, 5.0)
    return schedule, {(k, s): draw(seconds) for k in "FBIW" for s in range(schedule.num_stages)}


@given(durations())
def test_a_pipeline_takes_what_its_schedule_says(case: tuple[Any, dict[tuple[str, int], float]]) -> None:
    """Against `simulate`, for stages whose blocks take any time."""
    schedule, seconds = case
    stages = schedule.num_stages
    # One block a stage. I and W are of one product each, B of both.
    forwards, backwards = [], []
    for stage in range(stages):
        forwards.append(segment(product(512, 1, 1), memory(seconds["F", stage]), blocks=(stage,)))
        weights = product(sizes=((1, 1, 1, 512),), part="backward", name=f"weights {stage}")
        backwards.append(
            segment(memory(seconds["I", stage], part="backward"), weights, phase="backward", blocks=(stage,))
        )
    step = trace(*forwards, *reversed(backwards), num_blocks=stages)
    tiny = 5e-5  # seconds of both products and their bytes

    def expected(action: Action) -> float:
        return 0.0 if action.kind == "W" else seconds["I" if action.kind in "BI" else "F", action.stage]

    timeline = time_pipeline(step, QUICK, schedule, keep_spans=True)
    simulated = simulate(schedule, expected)
    slack = tiny * 3 * schedule.microbatches * stages
    assert timeline.seconds == pytest.approx(simulated.length, abs=slack, rel=1e-9)
    ends = {(span.stream, span.name, span.module): span.end for span in timeline.spans}
    for rank, spans in enumerate(simulated.spans):
        for (kind, stage, microbatch), _, end in spans:
            assert ends[f"pp={rank}", f"{kind}{microbatch}", f"stage {stage}"] == pytest.approx(end, abs=slack)


def whole_step(blocks: int = 32, times: Sequence[int] = (1, 6, 1)) -> Trace:
    segments, number = [], 0
    for microbatch in range(len(times)):
        for phase, part in (("forward", "forward"), ("backward", "backward")):
            for each in ((0,), range(1, blocks - 1), (blocks - 1,)):
                events: list[Any] = [start(number, 1e-4, "dp"), wait(number)]
                for i in range(12):
                    events += [product(4096, 4096, 4096, part, module=f"layers.{i}<&>"), memory(1e-4, part=part)]
                events.append(start(number + 1, 1e-4, "tp"))
                events += [memory(1e-4), wait(number + 1)]
                segments.append(segment(*events, phase=phase, microbatch=microbatch, blocks=each))  # type: ignore[arg-type]
                number += 2
    update = memory(1e-3, "optimizer", kind="optimizer")
    segments.append(segment(update, phase="optimizer", microbatch=-1))
    return trace(*segments, times=times, num_blocks=blocks)


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_add_up_to_the_step(compiled: bool) -> None:
    step, chip = whole_step(), load_chip("h100")
    result = estimate(step, chip=chip, mesh_sizes={"dp": 8}, tokens=10**6, flops=1e18, compiled=compiled)
    assert list(result.parts) == list(PARTS)
    assert sum(result.parts.values()) == pytest.approx(result.seconds, rel=1e-12)
    assert result.seconds >= device_seconds(step, chip, compiled=compiled) * (1 - 1e-9)
    again = estimate(step, chip=chip, mesh_sizes={"dp": 8}, tokens=10**6, flops=1e18, compiled=compiled)
    assert again == result


@pytest.mark.exhaustive
@pytest.mark.every_value
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"dp": 8}, {"zero": 3}, id="zero 3"),
        pytest.param({"dp": 16, "tp": 2}, {"sequence": True, "zero": 1}, id="sequence"),
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, {"context": "ulysses", "recompute": "full"}, id="ulysses"),
        pytest.param({"pp": 2, "dp": 2}, {"pipeline": PipelinePlan(microbatches=4, schedule="zero_bubble")}, id="pp"),
    ],
)
def test_traces_of_models_have_estimates(sizes: dict[str, int], options: dict[str, Any]) -> None:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        num_layers=16,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=1024,
        max_seq_len=512,
    )
    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16)
    plan, chip = replace(model.parallel_plan(), **options), load_chip("h100")
    step = trace_step(model, ProcessMesh.grid(**sizes), plan, StepShape(batch=(64, 512), microbatches=4), clip_norm=1.0)
    schedule = None if plan.pipeline is None else plan.pipeline.make_schedule(sizes["pp"])
    tokens = 64 * 512
    for compiled in (False, True):
        result = estimate(
            step,
            chip=chip,
            mesh_sizes=sizes,
            tokens=tokens,
            flops=tokens * flops_per_token(config, 512),
            schedule=schedule,
            compiled=compiled,
        )
        assert sum(result.parts.values()) == pytest.approx(result.seconds, rel=1e-12)
        assert 0 < result.mfu < 1 and all(seconds >= 0 for seconds in result.parts.values())
        assert (result.parts["bubble"] > 0) == (schedule is not None)
        if schedule is None:
            world = math.prod(sizes.values())
            whole = time_step(step, chip, compiled=compiled, world=world, expand=True)
            assert result.seconds == pytest.approx(whole.seconds, rel=0.005)
            assert result.seconds >= device_seconds(step, chip, compiled=compiled) * (1 - 1e-9)


def test_a_step_of_three_blocks_and_microbatches_is_priced_in_milliseconds() -> None:
    step, chip = whole_step(), load_chip("h100")
    assert sum(len(each.events) for each in step.segments) > 500
    assert python_ratio(lambda: estimate(step, chip=chip, mesh_sizes={"dp": 8}, tokens=10**6, flops=1e18)) < 50


def test_the_picture_is_xml_without_scripts_and_names_what_it_shows() -> None:
    result = estimate(whole_step(), chip=load_chip("h100"), mesh_sizes={"dp": 8}, tokens=1, flops=1, keep_spans=True)
    svg = timeline_svg(result.timeline, "Llama <8B> & more")
    root = ET.fromstring(svg)
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Llama <8B> & more", DEVICE, "over dp", "over tp"} <= set(texts)
    assert any(text.startswith("products") for text in texts) and any(text.startswith("×") for text in texts)
    assert "script" not in svg and len(svg) < 1_000_000
    width = float(root.attrib["width"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width + 0.1


def test_the_events_for_perfetto_are_rows_of_streams() -> None:
    result = estimate(whole_step(), chip=load_chip("h100"), mesh_sizes={"dp": 8}, tokens=1, flops=1, keep_spans=True)
    events = json.loads(timeline_json(result.timeline))["traceEvents"]
    rows = {each["args"]["name"]: each["tid"] for each in events if each["name"] == "thread_name"}
    assert set(rows) == {DEVICE, "over dp", "over tp", "left out"}
    spans = [each for each in events if each["ph"] == "X"]
    assert len(spans) == len(result.timeline.spans) + len(result.timeline.repeated)
    assert max(each["ts"] + each["dur"] for each in spans) == pytest.approx(result.seconds * 1e6, rel=1e-6)
    assert {"module", "part", "where"} == set(spans[0]["args"])


def test_a_picture_of_a_pipeline_has_a_row_a_rank() -> None:
    result = of_pipeline(stage_trace(8, gradients=0.5, optimizer=0.25), "interleaved", chunks=2)
    root = ET.fromstring(timeline_svg(result.timeline))
    texts = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"pp=0", "pp=3", "forward", "backward", "F0", "B7"} <= texts


def test_an_empty_step_has_a_picture() -> None:
    result = estimate(trace(), chip=QUICK, mesh_sizes={"dp": 1}, tokens=1, flops=1, keep_spans=True)
    assert result.seconds == 0 and result.mfu == 0
    ET.fromstring(timeline_svg(result.timeline))
    assert json.loads(timeline_json(result.timeline))["traceEvents"] == []
