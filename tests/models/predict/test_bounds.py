"""Lower bounds are below what they bound: pipelines of any durations, weights of any plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.models.predict.bounds import Seconds, StageSeconds, StageWork, layers_of_stages, pipeline_floor
from weft.models.predict.data_work import WITHOUT_DATA, received_share
from weft.models.predict.pipeline_flow import flow_floor
from weft.models.predict.plan_memory import in_flight
from weft.models.predict.plans import Candidate
from weft.models.predict.schedule_bounds import bounds_of
from weft.models.schedules.pipeline_plan import make_schedule
from weft.models.schedules.schedule import NAMES, Action, ScheduleName, simulate
from weft.reshard.world.collective_bytes import received_bytes

SECONDS = st.one_of(st.just(1.0), st.floats(0.0, 3.0))


@given(data=st.data(), name=st.sampled_from(NAMES), ranks=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_no_schedule_ends_before_the_floor(
    data: st.DataObject, name: ScheduleName, ranks: int, microbatches: int
) -> None:
    chunks = data.draw(st.integers(2, 3)) if name == "interleaved" else 1
    if name == "interleaved":
        microbatches = ranks * max(1, microbatches // ranks)
    stages = ranks * chunks
    forward, backward, later, first = (data.draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in range(4))

    def duration(action: Action) -> float:
        weights = first if action.microbatch == 0 else later  # the first microbatch's gradients are new
        of_kind = {"F": forward, "I": backward, "W": weights}
        if action.kind == "B":
            return backward[action.stage] + weights[action.stage]
        return of_kind[action.kind][action.stage]

    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    of_first, of_later = ([a + b for a, b in zip(backward, weights, strict=True)] for weights in (first, later))
    floor = pipeline_floor(
        forward, of_later, first_backward=of_first, ranks=ranks, microbatches=microbatches, schedule=name
    )
    assert floor <= simulate(schedule, duration).length * (1 + 1e-12)


@given(
    data=st.data(), name=st.sampled_from(["gpipe", "1f1b", "interleaved"]), ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6), message=st.sampled_from([0.0, 0.25]),
)  # fmt: skip
def test_the_floor_in_the_order_of_a_schedule_is_its_length_and_above_the_floor_of_any_order(
    data: st.DataObject, name: ScheduleName, ranks: int, microbatches: int, message: float
) -> None:
    chunks = 2 if name == "interleaved" else 1
    if name == "interleaved":
        microbatches = ranks * max(1, microbatches // ranks)
    seconds = [data.draw(st.lists(SECONDS, min_size=ranks * chunks, max_size=ranks * chunks)) for _ in range(3)]
    forward, first_backward, backward = seconds
    stages = StageSeconds(forward, first_backward, forward, backward)
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    begins, after = ([data.draw(st.floats(0.0, 2.0)) for _ in range(ranks)] for _ in range(2))
    found = flow_floor(schedule, stages, message=message, begins=[0.0] * ranks, gradients=[0.0] * ranks)

    def duration(action: Action) -> float:
        of_backward = first_backward if action.microbatch == 0 else backward
        return (forward if action.kind == "F" else of_backward)[action.stage]

    if message == 0.0:
        assert found == pytest.approx(simulate(schedule, duration).length)
    of_any_order = pipeline_floor(
        forward, backward, first_backward=first_backward, ranks=ranks, microbatches=microbatches, schedule=name,
        message=message if ranks > 1 else 0.0,
    )  # fmt: skip
    assert found >= of_any_order * (1 - 1e-12)
    later = flow_floor(schedule, stages, message=message, begins=begins, gradients=after)
    assert found <= later <= found + max(begins) + max(after) + 1e-9


def test_halves_of_a_backward_have_no_floor_in_order() -> None:
    schedule, ones = make_schedule("zero_bubble", ranks=2, microbatches=2), [1.0, 1.0]
    with pytest.raises(ValueError, match="'zero_bubble' splits the backward"):
        flow_floor(schedule, StageSeconds(ones, ones, ones, ones), begins=ones, gradients=ones)


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        pytest.param("gpipe", 1, 3 * (8 + 3), id="gpipe"),
        pytest.param("1f1b", 1, 3 * (8 + 3), id="1f1b"),
        pytest.param("interleaved", 2, 3 * (2 * 8 + 3), id="interleaved"),
        pytest.param("zero_bubble", 1, 3 * 8 + 3, id="zero-bubble"),
    ],
)
def test_the_floor_of_equal_stages_is_the_length_by_the_formula(name: ScheduleName, chunks: int, expected: int) -> None:
    """4 ranks, 8 microbatches: a forward takes 1, a backward 2, as in `bubble_formula`."""
    forward, backward = [1.0] * 4 * chunks, [2.0] * 4 * chunks
    assert pipeline_floor(forward, backward, ranks=4, microbatches=8, schedule=name) == expected
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=chunks)
    assert simulate(schedule).length == expected


@given(name=st.sampled_from(NAMES), ranks=st.integers(1, 6), microbatches=st.integers(1, 24), chunks=st.integers(2, 3))
def test_the_facts_of_a_schedule_are_those_of_its_actions(
    name: ScheduleName, ranks: int, microbatches: int, chunks: int
) -> None:
    if name == "interleaved":
        microbatches = ranks * max(1, microbatches // ranks)
    else:
        chunks = 1
    schedule, facts = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks), bounds_of(name)
    assert facts.splits_backward == schedule.splits_backward
    assert facts.in_flight(ranks, microbatches, chunks) == schedule.in_flight()[0] / chunks


def test_a_schedule_without_bounds_is_refused_by_name() -> None:
    options: dict[str, Any] = {"ranks": 2, "microbatches": 2, "schedule": "new"}
    with pytest.raises(ValueError, match=r"schedule 'new'.*add a row to SCHEDULE_BOUNDS"):
        pipeline_floor([1.0, 1.0], [1.0, 1.0], **options)
    with pytest.raises(ValueError, match=r"schedule 'new'.*add a row to SCHEDULE_BOUNDS"):
        in_flight(Candidate(pp=2, microbatches=2, schedule=options["schedule"]))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_the_share_received_is_that_counted_in_a_run(kind: str, ranks: int) -> None:
    whole = 3 * ranks * ranks
    own = whole // ranks
    sizes = {"all-reduce": (whole, whole), "all-gather": (own, whole), "reduce-scatter": (whole, own)}
    counted = received_bytes(kind, ranks, *sizes.get(kind, (own, own)))
    assert received_share(kind, ranks) * whole == pytest.approx(counted)


def test_a_kind_of_collective_whose_share_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'broadcast' over 4 ranks; add the share"):
        received_share("broadcast", 4)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        pytest.param(80, 4, [20] * 4, id="even"),
        pytest.param(7, 3, [3, 2, 2], id="longer-first"),
        pytest.param(3, 3, [1, 1, 1], id="one-each"),
    ],
)
def test_layers_are_cut_as_a_pipeline_cuts_them(layers: int, stages: int, expected: list[int]) -> None:
    assert layers_of_stages(layers, stages) == expected


WORK = replace(WITHOUT_DATA, gathers=1.0, in_backward=0.5, update=0.25)


def test_a_stage_sums_the_gradients_of_its_blocks_in_every_backward_pass() -> None:
    candidate = Candidate(pp=4, dp=2, zero=2, schedule="1f1b", microbatches=8)
    of_blocks = 1.0 * 1  # 6 blocks on 4 ranks: at least one block is gathered
    hidden, exposed = (WORK.with_passes(candidate, 6, passes) for passes in (50.0, 5.0))
    assert hidden == 50.0 + of_blocks + 0.25 / 4
    assert exposed == 8 * 2 * 0.5 + of_blocks + 0.25 / 4  # of the rank with two blocks


def test_collectives_that_outlast_the_work_of_a_pass_make_the_pass_longer() -> None:
    """Of 4 blocks whose backward takes 1 s each: on a rank with all blocks, and in stages of two."""
    block = Seconds(forward=0.5, backward=1.0)
    sums = tuple(Seconds(forward=0.5 * number, backward=1.0 * number) for number in (0, 1, 2, 3, 4, 4))
    work = StageWork(first=sums, later=sums)
    slow = replace(WITHOUT_DATA, in_backward=3.0, under_way=2.0, of_forward=2.5, of_backward=7.0)
    alone = Candidate(dp=2, zero=3, microbatches=3)
    assert work.seconds(alone) == 3 * 4 * (block.forward + block.backward)
    assert work.seconds(alone, data=slow) == 3 * (2.5 + 7.0)
    staged = Candidate(pp=2, dp=2, zero=2, schedule="1f1b", microbatches=4)
    passes = [2 * block.forward, max(2 * block.backward, 2 * 3.0 - 2.0)]
    assert work.seconds(staged, data=slow) == 4 * sum(passes) + sum(passes)  # and the way in and back
