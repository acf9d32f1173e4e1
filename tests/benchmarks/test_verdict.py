"""A time has changed where its ratio to what ran beside it did, by more than the spreads; the machine changes none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import Budgets, Comparison
from benchmarks.record import Case, Run
from tests.benchmarks.cases import beside, case, run


def judged(new: Run, old: Run) -> Comparison:
    return compare.compare(new, [old], replace(Budgets.read(), counts={}))


def changed(old: list[Case], new: list[Case]) -> list[tuple[str, str, str]]:
    """Name, ratio before, ratio now; the page, `report` and the command take it from here."""
    found = compare.changes(run(*new, minute=1), [run(*old)])
    return [
        (each.case.name, f"{each.before.median:.2f}", f"{each.now.median:.2f}")
        for each in found
        if each.slower or each.faster
    ]


def cases(weft: float = 1.0, torch: float = 1.0, **rest: Any) -> list[Case]:
    """Two cases with two baselines each. weft: slowdown of the first case; torch: slowdown of all baselines."""
    ways = {"Weft": 1e-3, "torch": 2e-3, "DTensor": 3e-3}
    return [
        case(name, way, median * (torch if way != "Weft" else weft if name == "a" else 1.0), **rest)
        for name in "ab"
        for way, median in ways.items()
    ]


def test_a_slowdown_of_all_alike_is_the_machines() -> None:
    slowed = [replace(each, figures={k: 1.5 * v for k, v in each.numbers.items()}) for each in cases()]
    assert changed(cases(), slowed) == []
    found = compare.changes(run(*slowed, minute=1), [run(*cases())])
    assert compare.sentence(found) == (
        "nothing changed beyond what the machine does, of 2 times beside their baselines"
    )
    assert not judged(run(*slowed, minute=1), run(*cases())).failures


@pytest.mark.parametrize(("pace", "ratio"), [(1.5, "2.00"), (0.5, "6.00")], ids=["slower", "faster"])
def test_a_case_that_changed_alone_is_named_with_its_ratios(pace: float, ratio: str) -> None:
    """By the baseline that moved the least: here both moved alike, and the first is taken, DTensor."""
    assert changed(cases(), cases(weft=pace)) == [("a", "3.00", ratio)]
    found = compare.changes(run(*cases(weft=pace), minute=1), [run(*cases())])
    slower = pace > 1
    told = f"{1 if slower else 'none'} of 2 times slowed down, {'none' if slower else 1} sped up"
    assert compare.sentence(found) == f"beside their baselines {told}"
    assert len(judged(run(*cases(weft=pace), minute=1), run(*cases())).failures) == 2 * slower


@pytest.mark.parametrize("when", ["before", "now"])
@pytest.mark.parametrize("way", ["Weft", "torch"])
def test_a_case_within_the_spread_of_either_run_and_way_is_not(when: str, way: str) -> None:
    wide = {"seconds_p20": 0.5e-3, "seconds_p80": 4e-3}
    old, new = ([case(median=pace * 1e-3), case(way="torch", median=2e-3)] for pace in (1.0, 1.5))
    assert len(changed(old, new)) == 1
    noisy = old if when == "before" else new
    noisy[:] = [replace(each, figures=each.figures | wide) if each.way == way else each for each in noisy]
    assert changed(old, new) == []


def test_one_baseline_that_moved_alone_changes_nothing() -> None:
    old, new = ([case(), case(way="torch", median=2e-3 * p), case(way="DTensor", median=3e-3)] for p in (1, 5))
    assert changed(old, new) == changed(new, old) == []


def test_baselines_that_disagree_change_nothing() -> None:
    old = [case(), case(way="torch"), case(way="DTensor")]
    new = [case(), case(way="torch", median=2e-3), case(way="DTensor", median=0.4e-3)]
    assert changed(old, new) == []


def test_a_time_without_a_baseline_is_shown_and_not_judged() -> None:
    old, new = (run(case(median=each), case(way="Weft, one shard"), minute=each > 1) for each in (1, 9))
    found = judged(new, old)
    assert [(each.baseline, each.slower, each.ratio) for each in found.changes] == [
        (None, False, pytest.approx(1 / 9)),
        (None, False, 1.0),
    ]
    assert str(found.changes[0]) == (
        "losses: loss, Weft: no baseline beside it, not judged; 1000 ms before, 9000 ms now"
    )
    assert (compare.sentence(found.changes), found.failures) == ("no time is compared", ())


def test_a_way_that_one_run_lacks_is_no_baseline() -> None:
    old, new = [case(), case(way="torch")], [case(median=9e-3), case(way="DTensor")]
    assert [each.baseline for each in compare.changes(run(*new, minute=1), [run(*old)])] == [None]


def test_a_kernel_that_another_timer_takes_once_it_is_slower_is_named() -> None:
    """Above a millisecond CUDA events time a kernel, below it a graph."""
    old, new = ([case(median=pace, timer=timer), case(way="torch", median=5e-3, timer="events")]
                for pace, timer in ((0.9e-3, "graph"), (1.2e-3, "events")))  # fmt: skip
    assert changed(old, new) == [("loss", "5.56", "4.17")]


def test_a_new_case_is_no_change_and_a_lost_one_a_failure() -> None:
    old, new = beside(case("a"), case("old")), beside(case("a"), case("b"))
    found = judged(run(*new, minute=1), run(*old))
    assert [each.case.name for each in found.changes] == ["a"]
    assert [failure.partition(": measured")[0] for failure in found.failures] == [
        "losses: old, Weft",
        "losses: old, torch",
    ]
