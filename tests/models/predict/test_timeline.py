"""A rank's step in time: overlap, shared links, the host, and copies that are added as a multiple."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.models.predict.events import Event, Segment, Trace
from weft.models.predict.timeline import DEVICE, PARTS, Timeline, time_step

from tests.models.predict.traces import NVLINK, TOY, memory, product, segment, start, trace, wait

QUICK = replace(TOY, levels=(replace(NVLINK, latency=0.0), TOY.levels[1]))  # an all-gather takes its bytes' time


def timed(*events: Event, chip: Any = QUICK, **options: Any) -> Timeline:
    return time_step(trace(segment(*events)), chip, keep_spans=True, **options)


def test_a_hidden_collective_takes_no_time() -> None:
    result = timed(start(0, 1.0), memory(2.0), wait(0), memory(1.0))
    assert result.seconds == pytest.approx(3.0)
    assert result.parts["communication"] == 0
    assert [(span.stream, span.begin, span.end) for span in result.spans] == [
        (DEVICE, 0.0, 2.0),
        (DEVICE, 2.0, 3.0),
        ("tp", 0.0, 1.0),
    ]


def test_communication_that_is_not_hidden_is_exposed() -> None:
    result = timed(start(0, 3.0), memory(2.0), wait(0), memory(1.0))
    assert result.seconds == pytest.approx(4.0)
    assert result.parts["communication"] == pytest.approx(1.0)


def test_a_collective_starts_after_the_work_before_it() -> None:
    result = timed(memory(2.0), start(0, 1.0), wait(0))
    assert result.seconds == pytest.approx(3.0)


def test_a_step_ends_with_its_last_collective() -> None:
    assert timed(memory(1.0), start(0, 2.0)).parts["communication"] == pytest.approx(2.0)


def test_collectives_of_a_group_run_in_order() -> None:
    result = timed(start(0, 2.0), start(1, 1.0), wait(1))
    assert result.seconds == pytest.approx(3.0)
    assert [(span.begin, span.end) for span in result.spans] == [(0.0, 2.0), (2.0, 3.0)]


def test_groups_share_the_links_of_a_level() -> None:
    # Both run at half speed until the shorter is done after 2 s; the longer then has 2 s left.
    result = timed(start(0, 1.0, "tp"), start(1, 3.0, "dp"), wait(0), wait(1))
    assert [(span.stream, span.end) for span in result.spans] == [("tp", 2.0), ("dp", 4.0)]
    outside = start(1, 0.0, "dp", size=2, stride=8, nbytes=10 * 10**9)
    apart = timed(start(0, 1.0, "tp"), outside, wait(0), wait(1))  # on a level of its own
    assert [span.end for span in apart.spans] == pytest.approx([1.0, 1.0], rel=1e-4)


def test_links_slow_the_device() -> None:
    chip = replace(QUICK, levels=(replace(QUICK.levels[0], slowdown=0.25), QUICK.levels[1]))
    # For 3 s the device does 2.25 s of its work; the other 0.75 s follow at full speed.
    result = timed(start(0, 3.0), memory(3.0), chip=chip)
    assert result.seconds == pytest.approx(3.75)


def test_on_a_cpu_a_collective_may_need_the_whole_device() -> None:
    chip = replace(QUICK, levels=(replace(QUICK.levels[0], slowdown=1.0), QUICK.levels[1]))
    assert timed(start(0, 3.0), memory(2.0), chip=chip).seconds == pytest.approx(5.0)
    assert timed(memory(2.0), start(0, 3.0), memory(0.0), chip=chip).seconds == pytest.approx(5.0)


def test_the_device_idles_where_the_host_is_behind() -> None:
    chip = replace(QUICK, host_seconds=1.0)
    # Ops are issued at 1, 2, 3 and 4 s, and take 2.5, 0.1, 0.1 and 0.1 s.
    result = timed(memory(2.5), memory(0.1), memory(0.1), memory(0.1), chip=chip)
    assert result.seconds == pytest.approx(4.1)
    assert result.parts["host"] == pytest.approx(1.0 + 0.3)
    assert timed(memory(2.5), memory(0.1), chip=chip, compiled=True).parts["host"] == 0
    assert timed(memory(0.1, num_launches=3), chip=chip).parts["host"] == pytest.approx(3.0)


def test_on_a_cpu_the_host_computes_and_waits() -> None:
    chip = replace(QUICK, host_seconds=1.0, threads=1)
    assert timed(memory(2.5), memory(0.1), chip=chip).seconds == pytest.approx(4.6)
    # The collective is on its way for 3 s, of which the op and the host take 2.
    result = timed(start(0, 3.0), memory(1.0), wait(0), memory(1.0), chip=chip)
    assert result.seconds == pytest.approx(5.0)
    assert result.parts["communication"] == pytest.approx(1.0)


def test_on_a_cpu_no_op_runs_while_a_collective_is_issued() -> None:
    chip = replace(QUICK, collective_host_seconds=0.5, threads=1)
    result = timed(start(0, 3.0), memory(1.0), wait(0), chip=chip)
    assert result.seconds == pytest.approx(3.5)
    assert result.parts["host"] == pytest.approx(0.5) and result.parts["communication"] == pytest.approx(2.0)
    assert timed(start(0, 3.0, size=1), memory(1.0), wait(0), chip=chip).seconds == pytest.approx(1.0)
    assert timed(start(0, 3.0), memory(1.0), wait(0), chip=replace(chip, threads=None)).seconds == pytest.approx(3.0)


def test_ranks_that_drift_apart_wait_for_the_last_at_each_collective() -> None:
    chip = replace(QUICK, drift=0.5, threads=1)
    # 4 s of work drift ranks 1 s apart, and the 1 s of work after the collective drifts them 0.5 s apart.
    work = memory(4.0), start(0, 3.0), wait(0), memory(1.0), start(1, 3.0), wait(1), wait(1)
    result = timed(*work, chip=chip)
    assert result.seconds == pytest.approx(5.0 + 6.0 + 1.5)
    assert result.parts["communication"] == pytest.approx(6.0 + 1.5)
    # The collective ends beside the work, and so does the wait for the last rank.
    assert timed(start(0, 1.0), memory(4.0), wait(0), chip=chip).seconds == pytest.approx(4.0)
    assert timed(start(0, 3.5), memory(4.0), wait(0), chip=chip).seconds == pytest.approx(4.5)
    assert timed(memory(4.0), start(0, 3.0, size=1), wait(0), chip=chip).seconds == pytest.approx(4.0)


def test_a_loop_whose_ranks_drift_apart_takes_as_long_as_its_copies() -> None:
    chip = replace(QUICK, drift=0.5, threads=1)
    blocks = trace(segment(memory(2.0), start(0, 1.0), wait(0), memory(0.5), blocks=range(60)), num_blocks=60)
    assert time_step(blocks, chip).seconds == pytest.approx(time_step(blocks, chip, expand=True).seconds)
    # Each block waits 1 s for its collective and 0.5 * sqrt(2.5) s for the last rank; the first has 2 s before it.
    expected = 60 * 2.5 + 60 + 0.5 * (59 * math.sqrt(2.5) + math.sqrt(2.0))
    assert time_step(blocks, chip).seconds == pytest.approx(expected)


def test_a_compiler_fuses_elementwise_work() -> None:
    events = memory(0.3, "aten.add"), memory(0.3, "aten.mul")
    assert timed(*events).seconds == pytest.approx(0.6)
    assert timed(*events, compiled=True).seconds == pytest.approx(0.4)


def test_waiting_twice_or_for_nothing_takes_no_time() -> None:
    assert timed(start(0, 1.0), wait(0), wait(0), wait(7), memory(1.0)).seconds == pytest.approx(2.0)
    assert timed().seconds == 0


def gathering(blocks: int, *, ahead: bool = True, backlog: float = 0.0, work: float = 1.0) -> Trace:
    """Blocks whose parameters are gathered, one block ahead or when needed, and whose gradients may pile up."""
    numbers = iter(range(100))
    segments: list[Segment] = []
    previous: int | None = None
    for each in ((0,), tuple(range(1, blocks - 1)), (blocks - 1,)):
        events: list[Event] = []
        number = next(numbers)
        events.append(start(number, 0.7, "dp"))
        if not ahead:
            events.append(wait(number))
        elif previous is not None:
            events.append(wait(previous))
        events += [memory(work / 2), product()]
        if backlog:
            events.append(start(next(numbers), backlog, "sync", kind="reduce-scatter"))
        events.append(memory(work / 2))
        segments.append(segment(*events, blocks=each))
        previous = number
    events = [wait(i) for i in range(next(numbers))]
    return trace(*segments, segment(*events, phase="gradients", microbatch=-1), num_blocks=blocks)


@pytest.mark.parametrize("blocks", [3, 4, 5, 8, 100])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="gathered ahead"),
        pytest.param({"ahead": False}, id="gathered when needed"),
        pytest.param({"work": 0.5}, id="links are slower"),
        pytest.param({"backlog": 2.0}, id="gradients pile up"),
        pytest.param({"backlog": 0.2, "work": 0.1}, id="both"),
    ],
)
def test_copies_added_as_a_multiple_take_as_long(blocks: int, options: dict[str, Any]) -> None:
    step = gathering(blocks, **options)
    whole = time_step(step, QUICK, expand=True)
    assert time_step(step, QUICK).seconds == pytest.approx(whole.seconds, rel=1e-9)
    for part in PARTS:
        assert time_step(step, QUICK).parts[part] == pytest.approx(whole.parts[part], abs=1e-9 * whole.seconds)


def test_a_block_gathered_ahead_is_hidden() -> None:
    result = time_step(gathering(50, work=1.0), QUICK)
    assert result.parts["communication"] == 0  # each gather has a second of the block before
    behind = time_step(gathering(50, ahead=False), QUICK)
    assert behind.parts["communication"] == pytest.approx(50 * 0.7)


def gathering_two_ahead(blocks: int) -> Trace:
    """Blocks in the order of the program, each awaiting its gather and starting that of the block after the next."""
    segments = []
    for block in range(blocks):
        starts = [start(block + 2, 0.9, "dp")] if block + 2 < blocks else []
        first = [start(0, 0.9, "dp"), start(1, 0.9, "dp")] if block == 0 else []
        segments.append(segment(*first, *starts, wait(block), memory(0.8), blocks=(block,)))
    return trace(*segments, num_blocks=blocks)


def test_gathers_two_blocks_ahead_are_awaited_in_order() -> None:
    blocks = 40
    few = gathering_two_ahead(5).segments  # the middle one stands for many
    middle = replace(few[2], blocks=tuple(range(2, blocks - 2)))
    last = tuple(replace(each, blocks=(blocks - 2 + i,)) for i, each in enumerate(few[3:]))
    step = trace(*few[:2], middle, *last, num_blocks=blocks)
    assert time_step(step, QUICK).seconds == pytest.approx(time_step(gathering_two_ahead(blocks), QUICK).seconds)
    assert time_step(step, QUICK, expand=True).seconds == pytest.approx(time_step(step, QUICK).seconds)


@pytest.mark.parametrize(("ahead", "blocks"), [(2, 11), (2, 100), (5, 40), (9, 100)])
@pytest.mark.parametrize("work", [0.2, 0.29, 0.4])
def test_gathers_ahead_that_the_links_do_not_keep_up_with(ahead: int, blocks: int, work: float) -> None:
    """The first waits are for gathers long done; each later wait is longer than the wait before."""
    first = segment(*[start(number, 0.3) for number in range(ahead)], memory(0.3 * ahead + 1), blocks=(0,))
    loop = segment(start(ahead, 0.3), wait(0), memory(work), blocks=range(1, blocks + 1))
    step = trace(first, loop, segment(memory(100.0), blocks=(blocks + 1,)), num_blocks=blocks + 2)
    whole, quick = time_step(step, QUICK, expand=True), time_step(step, QUICK)
    assert quick.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert quick.parts["communication"] == pytest.approx(whole.parts["communication"], abs=1e-6)


def test_a_host_that_loses_its_lead() -> None:
    # The first op gives the host a lead of 100 s; blocks then cost the host more than the device.
    chip = replace(QUICK, host_seconds=1.0)
    step = trace(
        segment(memory(100.0)),
        segment(*[memory(0.5) for _ in range(4)], blocks=range(80)),
        segment(memory(1.0)),
    )
    whole = time_step(step, chip, expand=True)
    assert time_step(step, chip).seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert whole.seconds == pytest.approx(1 + 80 * 4 + 1 + 1.0)  # the last op is issued after 322 s
    assert whole.parts["host"] == pytest.approx(323 - 261)


def test_microbatches_are_loops_over_blocks() -> None:
    segments = []
    for microbatch in range(3):
        for blocks in ((0,), range(1, 9), (9,)):
            events = start(len(segments), 0.3), memory(1.0), wait(len(segments)), memory(0.5)
            segments.append(segment(*events, microbatch=microbatch, blocks=blocks))
    step = trace(*segments, times=(1, 30, 1), num_blocks=10)
    assert time_step(step, QUICK).seconds == pytest.approx(32 * 10 * 1.5)
    result = time_step(step, QUICK, keep_spans=True)
    assert sum(each.copies for each in result.repeated) > 20
    assert max(span.end for span in result.spans) == pytest.approx(32 * 10 * 1.5)


def test_blocks_of_a_period_take_turns() -> None:
    step = trace(
        segment(memory(1.0), start(0, 3.0), blocks=range(0, 20, 2)),
        segment(memory(1.0), wait(0), memory(1.0), blocks=range(1, 20, 2)),
        num_blocks=20,
    )
    assert time_step(step, QUICK).seconds == pytest.approx(10 * 5.0)
    assert time_step(step, QUICK).parts["communication"] == pytest.approx(10 * 2.0)


@st.composite
def programs(draw: st.DrawFn) -> Trace:
    """A step of random events: some blocks alike, microbatches alike, and waits for a loop's earlier collectives."""
    number = 0
    segments: list[Segment] = []
    open_starts: list[int] = []
    times = draw(st.sampled_from([(1,), (1, 9, 1), (1, 3)]))
    seconds = st.sampled_from([0.01, 0.3, 1.0, 2.5])
    groups = st.sampled_from(["tp", "dp"])
    for microbatch in range(len(times)):
        for blocks in ((0,), range(1, 12), (12,)):
            events: list[Event] = []
            for choice in draw(st.lists(st.sampled_from("cccsw"), min_size=1, max_size=8)):
                if choice == "c":
                    events.append(memory(draw(seconds)))
                elif choice == "s":
                    events.append(start(number, draw(seconds), draw(groups)))
                    open_starts.append(number)
                    number += 1
                elif open_starts:
                    events.append(wait(open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))))
            segments.append(segment(*events, microbatch=microbatch, blocks=blocks))
    segments.append(segment(*[wait(each) for each in open_starts], phase="gradients", microbatch=-1))
    return trace(*segments, times=times, num_blocks=13)


@pytest.mark.exhaustive
@settings(max_examples=100)
@given(programs(), st.sampled_from([0.0, 0.2, 1.5]), st.sampled_from([0.0, 0.3]), st.booleans())
def test_any_step_is_followed_or_multiplied_alike(step: Trace, host: float, slowdown: float, is_cpu: bool) -> None:
    levels = (replace(QUICK.levels[0], slowdown=slowdown), QUICK.levels[1])
    chip = replace(QUICK, host_seconds=host, levels=levels, threads=1 if is_cpu else None)
    whole, quick = time_step(step, chip, expand=True), time_step(step, chip)
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.005)
    assert sum(quick.parts.values()) == pytest.approx(quick.seconds, rel=1e-12)
    assert all(seconds >= -1e-9 for seconds in quick.parts.values())
    assert whole.repeated == ()


@pytest.mark.exhaustive
@given(programs(), st.floats(1.0, 5.0))
def test_a_faster_machine_takes_no_longer_without_sharing(step: Trace, factor: float) -> None:
    one_group = replace(
        step,
        segments=tuple(
            replace(each, events=tuple(replace(e, group="tp") if hasattr(e, "group") else e for e in each.events))
            for each in step.segments
        ),
    )
    level = replace(QUICK.levels[0], bandwidth=factor * QUICK.levels[0].bandwidth)
    slow = time_step(one_group, QUICK, expand=True).seconds
    assert time_step(one_group, replace(QUICK, levels=(level,)), expand=True).seconds <= slow * (1 + 1e-9)
    memory_faster = replace(QUICK, name="memory", memory_bandwidth=factor * QUICK.memory_bandwidth)
    assert time_step(one_group, memory_faster, expand=True).seconds <= slow * (1 + 1e-9)
