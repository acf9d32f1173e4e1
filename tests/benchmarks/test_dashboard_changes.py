"""What the page says first: what changed, the worst first, on one machine; and where each line leads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from benchmarks import compare
from benchmarks.dashboard import changed, curves, past, sources
from benchmarks.dashboard.changed import Changed
from benchmarks.record import Case, Run
from tests.benchmarks import results
from tests.benchmarks.cases import case, counted, run
from tests.benchmarks.results import count, host

OTHER = {"cpu": "AMD EPYC 7763", "cores": 4, "load": 0.1}


def device_of(*runs: Run) -> sources.Device:
    *earlier, newest = runs
    comparison = compare.compare(newest, compare.beside(newest, earlier), compare.Budgets.read())
    return sources.Device(newest.device, {str(at): each for at, each in enumerate(runs)}, comparison)


def of(*runs: Run) -> Changed:
    device = device_of(*runs)
    return changed.changed(device, past.past(device))


def cpu(*cases: Case, minute: int = 0, **rest: Any) -> Run:
    return run(*cases, minute=minute, device="cpu", **rest)


def test_the_worst_comes_first_and_the_noise_has_no_line() -> None:
    before = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    now = {"a": 1.05, "b": 1.4, "c": 0.5, "d": 3.0}
    runs = [
        cpu(*(host("step", name, "Weft", each) for name, each in some.items()), minute=at)
        for at, some in enumerate((before, now))
    ]
    found = of(*runs)
    assert [(line.name, line.shown, line.word, line.worse) for line in found.lines] == [
        ("d", "3.00×", "slower", True),
        ("b", "1.40×", "slower", True),
        ("c", "0.50×", "faster", False),
    ]
    assert found.sentence == "On a CPU: 2 of 4 times are slower than before, 1 faster, and no counted figure changed."
    assert found.beside.startswith("Times of the host beside the median of 1 run on this machine.")


def test_a_line_says_what_became_of_the_others() -> None:
    def of_pace(minute: int, weft: float, torch: float) -> Run:
        return run(
            case(median=1e-3 * weft),
            case(way="torch", median=4e-3 * torch),
            case(way="Liger", median=1e-3),
            minute=minute,
        )

    (line,) = of(of_pace(0, 1, 1), of_pace(1, 1.5, 2.25)).lines
    assert (line.shown, line.others, line.before, line.now) == ("1.50×", "others 1.50×", "1 ms", "1.5 ms")
    (alone,) = of(run(case(), minute=0), run(case(median=2e-3), minute=1)).lines
    assert alone.others == "no other way"


def test_times_of_another_machine_are_not_compared_and_what_is_counted_is() -> None:
    old = cpu(host("step", "a", "Weft", 1.0), count("memory", "b", "Weft", peak_bytes=1e9), machine=OTHER)
    new = cpu(host("step", "a", "Weft", 9.0), count("memory", "b", "Weft", peak_bytes=2e9), minute=1)
    found = of(old, new)
    assert [(line.name, line.shown, line.word, line.others) for line in found.lines] == [
        ("b", "2.00×", "more", "counted")
    ]
    assert found.sentence == "On a CPU: no time is compared, and of the counted figures 1 grew and none fell."
    assert "not compared: other runs are of other machines" in found.beside
    untold = of(old, cpu(*new.cases, minute=2, machine={}))
    assert "not compared: the machine of this run was not recorded" in untold.beside


def test_what_the_compiler_counts_stands_apart() -> None:
    def of_registers(number: int, minute: int) -> Run:
        return cpu(
            count("compiled", "k", "Weft, sm_90", registers=number),
            count("memory", "b", "Weft", bytes=number),
            minute=minute,
        )

    found = of(of_registers(32, 0), of_registers(64, 1))
    assert [line.name for line in found.lines] == ["b"]
    assert [line.name for line in found.compiled] == ["k"]


def test_what_was_none_before_is_the_worst() -> None:
    old, new = (
        cpu(count("memory", "a", "Weft", spill_bytes=each), count("memory", "b", "Weft", bytes=1 + each), minute=each)
        for each in (0, 1)
    )
    assert [(line.name, line.shown, line.word) for line in of(old, new).lines] == [
        ("a", "from 0", "more"),
        ("b", "2.00×", "more"),
    ]
    assert [(line.shown, line.worse) for line in of(new, cpu(*old.cases, minute=2)).lines] == [
        ("0.50×", False),
        ("0×", False),
    ]


def test_what_breaks_a_budget_stands_before_all_else() -> None:
    held = "linear_cross_entropy, 4096 tokens"
    old, new = (
        cpu(
            host("step", "a", "Weft", pace),
            count("linear_cross_entropy", held, "Weft", peak_bytes=1.05e9 * pace),
            minute=minute,
        )
        for minute, pace in enumerate((1.0, 1.1))
    )
    slow = cpu(host("step", "a", "Weft", 9.0), *new.cases[:1], minute=2)
    assert [(line.name, line.broken) for line in of(old, slow).lines] == [(held, True), ("a", False)]
    kernel = of(run(minute=0), run(case(median=2e-3), minute=1)).lines
    assert [line.broken for line in kernel] == [True]


def test_the_first_screen_has_few_lines_and_the_rest_is_folded() -> None:
    runs = [
        cpu(*(host("step", f"{at:02}", "Weft", 1.0 + at * minute) for at in range(20)), minute=minute)
        for minute in (0, 1)
    ]
    found = of(*runs)
    assert [line.name for line in found.first] == ["19", "18", "17", "16", "15", "14"]
    assert len(found.first) + len(found.rest) == len(found.lines) == 19


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        pytest.param([cpu(counted(rows=1))], "On a CPU there is one run, and none before it to compare with.", id="one"),
        pytest.param([run(), run(minute=1)], "On NVIDIA H200: none of 1 times changed beyond the noise, and no counted figure changed.", id="same"),
    ],
)  # fmt: skip
def test_without_a_change_it_says_so(runs: list[Run], told: str) -> None:
    found = of(*runs)
    assert (found.sentence, found.lines) == (told, ())


def test_each_line_leads_to_the_chart_of_its_case_with_all_ways() -> None:
    def of_pace(minute: int, pace: float) -> Run:
        times = [host("step", name, way, pace) for name in "ab" for way in ("Weft", "torch", "torch again")]
        return cpu(
            *times,
            count("memory", "b", "Weft", peak_bytes=pace),
            count("memory", "c", "Weft", peak_bytes=1),
            minute=minute,
        )

    device = device_of(of_pace(0, 1.0), of_pace(1, 2.0))
    found = past.past(device)
    series = [each for group in found.groups for each in group.series]
    assert [each.key for each in series] == [
        ("step", "a", "time of the host"),
        ("step", "b", "time of the host"),
        ("memory", "b", "peak_bytes"),
    ], "what was counted alike in all runs has none"
    places = {(line.name, line.of): line.place for line in changed.changed(device, found).lines}
    assert places[("b", "Weft, memory above inputs and gradients")] == 2
    assert found.groups[0].ways == ("Weft", "torch"), "the noise is no way"
    assert {(way, at) for way, at, *_ in series[0].points} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_is_counted_beside_a_time_leads_to_a_chart_too() -> None:
    """Of a kernel its memory, of a step its collectives."""
    device = device_of(run(case(peak_bytes=100)), run(case(peak_bytes=200), minute=1))
    found = past.past(device)
    (line,) = changed.changed(device, found).lines
    assert (line.of, line.place) == ("Weft, memory above inputs and gradients", 1)

    runs = [cpu(host("step_time", "a", "Weft", 1.0, collectives=21 + at), minute=at) for at in (0, 1)]
    device = device_of(*runs)
    found = past.past(device)
    (line,) = changed.changed(device, found).lines
    assert (line.of, line.place) == ("Weft, collectives", 1)
    timed, counted = found.groups
    assert counted.title == f"{timed.title}, counted"
    assert [[number for *_, number, _ in each.points] for each in counted.series] == [[21, 22]]


@pytest.mark.parametrize("make", [results.of_a_gpu, results.of_two_machines])
def test_each_line_of_a_page_leads_to_a_chart(make: Callable[[Path], Path], tmp_path: Path) -> None:
    for device in sources.read(make(tmp_path)).devices:
        found = past.past(device)
        said = changed.changed(device, found)
        lines = (*said.lines, *said.compiled)
        assert all(line.place is not None for line in lines), device.name
        if make is results.of_two_machines:
            assert {"collectives", "host time"} <= {line.of.removeprefix("Weft, ") for line in lines}


def test_runs_of_one_machine_have_its_number() -> None:
    runs = [
        cpu(host("step", "a", "Weft", 1.0), minute=at, machine=each) for at, each in enumerate([OTHER, {}, OTHER, {}])
    ]
    assert past.past(device_of(*runs)).machines == (0, 1, 0, 2)


def test_losses_are_told_from_those_of_one_process() -> None:
    ways = {"Weft, dp=2": {"step_001": 2.0, "step_002": 1.5}, "Weft, one process": {"step_001": 2.0, "step_002": 1.0}}
    cases = [count("loss_curves", "m", way, **losses) for way, losses in ways.items()]
    whole, apart = curves.figures(cases)
    assert whole.note == "loss by step, Weft, one process; below, how far each other mesh lies from it"
    assert (apart.title, apart.note) == ("Weft, dp=2", "relative difference to Weft, one process; one scale for all")
    (table,) = curves.distances(cases)
    assert [(row.heads, row.cells[0].text) for row in table.rows] == [(("1",), "0.000e+00"), (("2",), "5.000e-01")]
    assert curves.distances(cases[:1]) == []
