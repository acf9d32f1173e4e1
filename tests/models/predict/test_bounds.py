"""Lower bounds are below what they bound: pipelines of any durations, weights of any plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.models.predict.bounds import WITHOUT_DATA, Seconds, StageWork, layers_of_stages, pipeline_floor
from weft.models.predict.plans import Candidate
from weft.models.schedules.pipeline_plan import make_schedule
from weft.models.schedules.schedule import NAMES, Action, ScheduleName, simulate

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
