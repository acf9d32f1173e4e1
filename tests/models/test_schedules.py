"""Pipeline schedules as values: every microbatch once, the papers' bubbles, the activations held, and no deadlock."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from weft.models.schedules.pipeline_plan import make_schedule
from weft.models.schedules.schedule import NAMES, Action, DeadlockError, Schedule, check_order, simulate

SIZES = list(itertools.product((1, 2, 3, 4, 8), (*range(1, 10), 16)))
NAMED = [*((name, 1) for name in NAMES if name != "interleaved"), ("interleaved", 2), ("interleaved", 3)]


def schedules(name: str, chunks: int) -> list[Schedule]:
    """The named schedule in each of many sizes that it allows."""
    made = []
    for ranks, microbatches in SIZES:
        rounds = max(1, microbatches // ranks)
        if name != "interleaved" or microbatches % rounds == 0:
            made.append(make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks))
    return made


def share_idle(schedule: Schedule) -> set[Fraction]:
    """Each rank's idle share of time, counted slot by slot in the picture."""
    rows = [line.split()[1:] for line in str(schedule).splitlines() if line.startswith("pp=")]
    length = max(map(len, rows))
    return {Fraction(length - sum(cell != "·" for cell in row), length) for row in rows}


@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_every_microbatch_goes_once_through_every_stage_in_order(name: str, chunks: int) -> None:
    for schedule in schedules(name, chunks):
        ends = {}
        for span in simulate(schedule).spans:
            for action, begin, end in span:
                assert action not in ends
                ends[action] = (begin, end)
        halves = 2 if name == "zero_bubble" else 1
        stages = schedule.ranks * chunks
        assert len(ends) == schedule.microbatches * stages * (1 + halves)
        back = "I" if name == "zero_bubble" else "B"
        for (kind, stage, microbatch), (begin, _) in ends.items():
            if kind == "F" and stage:
                assert begin >= ends[Action("F", stage - 1, microbatch)][1]
            if kind == back:
                after = Action(back, stage + 1, microbatch) if stage + 1 < stages else Action("F", stage, microbatch)
                assert begin >= ends[after][1]
            if kind == "W":
                assert begin >= ends[Action("I", stage, microbatch)][1]
        check_order(schedule)


@pytest.mark.parametrize("microbatches", [4, 8, 12])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_bubbles_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    p, m = ranks, microbatches
    idle = {name: share_idle(make_schedule(name, ranks=p, microbatches=m, chunks=v)) for name, v in NAMED if v != 3}
    assert idle["gpipe"] == idle["1f1b"] == {Fraction(p - 1, m + p - 1)}
    assert idle["interleaved"] == {Fraction(p - 1, 2 * m + p - 1)}
    (zero_bubble,) = idle["zero_bubble"]
    assert zero_bubble * (3 * m + p - 1) == p - 1  # p - 1 slots, where 1F1B has 3 (p - 1)


@pytest.mark.exhaustive
def test_the_bubbles_are_those_of_the_papers_on_any_size() -> None:
    for (name, v), (p, m) in itertools.product(NAMED, SIZES):
        if m < p or (name == "interleaved" and m % p):
            continue
        idle = {"zero_bubble": Fraction(p - 1, 3 * m + p - 1)}.get(name, Fraction(p - 1, v * m + p - 1))
        assert share_idle(make_schedule(name, ranks=p, microbatches=m, chunks=v)) == {idle}, (name, p, m, v)


def test_activations_in_flight() -> None:
    for p, m in SIZES:
        assert make_schedule("gpipe", ranks=p, microbatches=m).in_flight() == (m,) * p
        assert make_schedule("1f1b", ranks=p, microbatches=m).in_flight() == tuple(
            min(m, p - rank) for rank in range(p)
        )
        assert max(make_schedule("zero_bubble", ranks=p, microbatches=m).in_flight()) <= p


@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_anchor_30_no_deadlock_whatever_takes_how_long(name: str, chunks: int) -> None:
    times = random.Random(5)
    for schedule in schedules(name, chunks):
        simulate(schedule, lambda action: times.expovariate(1.0))
        if name != "interleaved" or schedule.microbatches % schedule.ranks == 0:
            simulate(schedule, lambda action: times.expovariate(1.0), sends="blocking")


def test_a_deadlock_is_found() -> None:
    good = make_schedule("1f1b", ranks=2, microbatches=2)
    (a0, a1, c0, c1), (f0, b0, f1, b1) = good.actions
    with pytest.raises(
        DeadlockError, match="rank 0 before B of microbatch 0 on stage 0, rank 1 before F of microbatch 1"
    ):
        simulate(replace(good, actions=((a0, c0, a1, c1), (f1, b1, f0, b0))))
    crossed = replace(good, actions=((a0, a1, c0, c1), (f1, b1, f0, b0)))
    with pytest.raises(
        ValueError, match=r"stage 0 takes the F of microbatches in the order \[0, 1\], and stage 1 in \[1, 0\]"
    ):
        check_order(crossed)


def test_the_picture() -> None:
    assert str(make_schedule("1f1b", ranks=2, microbatches=3)).splitlines() == [
        "pp=0  F0 F1 ·  ·  B0 W0 F2 B1 W1 ·  B2 W2",
        "pp=1  ·  F0 B0 W0 F1 B1 W1 F2 B2 W2 ·  ·",
        "bubble: 3 of 12 slots idle on a rank (25.0%); the formula's is 25.0%",
    ]
    assert "F0b" in str(make_schedule("interleaved", ranks=2, microbatches=2, chunks=2))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        pytest.param(
            "1f2b", {}, "there is no schedule '1f2b'; there are gpipe, 1f1b, interleaved, zero_bubble", id="name"
        ),
        pytest.param("1f1b", {"microbatches": 0}, "was given microbatches=0; it must be 1 or more", id="none"),
        pytest.param("1f1b", {"chunks": 2}, "has one stage on a rank, and chunks is 2; use 'interleaved'", id="chunks"),
        pytest.param("interleaved", {}, "has 2 or more stages on a rank, and chunks is 1", id="one-chunk"),
        pytest.param(
            "interleaved",
            {"chunks": 2, "microbatches": 9},
            "9 cannot be divided into 2 rounds over 4 ranks",
            id="rounds",
        ),
    ],
)
def test_conditions_are_named(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, **{"ranks": 4, "microbatches": 8, **sizes})


def test_a_schedule_is_checked_when_it_is_made() -> None:
    good = make_schedule("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ValueError, match="rank 0 takes microbatch 1 on stage 0 by the actions F; they must be"):
        replace(good, actions=(good.actions[0][:-1], good.actions[1]))
    with pytest.raises(ValueError, match="rank 0 has F of microbatch 0 on stage 1, but holds the stages 0"):
        replace(good, actions=(good.actions[1], good.actions[0]))
    with pytest.raises(ValueError, match=r"hold the stages \[0, 0\]"):
        replace(good, stages=((0,), (0,)))
