"""A slower case, a larger count and a lost case fail the run by name; noise and a figure at the limit do not."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, history
from benchmarks.compare import Budgets, Change, Comparison
from benchmarks.record import Case, Run, Spread
from tests.benchmarks.cases import MACHINE, beside, case, counted, run, unmeasured

BUDGETS = Budgets(
    group=0.95, case=0.90, counts={"traffic bytes": 6.05}, retired=frozenset({"old", "loss, Weft, given away"})
)
ROUNDS = 20  # of a benchmark


def compared(new: Run, *old: Run) -> Comparison:
    return compare.compare(new, old, BUDGETS)


def history_in(results: Path, *runs: Run) -> list[Path]:
    return [each.write(results / "NVIDIA-H200") for each in runs]


def slower(file: Path, name: str, factor: float) -> None:
    """Multiply the times of a case of Weft in a run's file by `factor`."""
    content = json.loads(file.read_text())
    (planted,) = (each for each in content["cases"] if each["name"] == name and each["way"] == "Weft")
    planted |= {key: value * factor for key, value in planted.items() if key.startswith("seconds")}
    file.write_text(json.dumps(content))


def test_a_planted_slowdown_of_one_case_fails_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case(f"loss[{size}]", median=size * 1e-6) for size in (1, 10, 100)]
    *_, newest = history_in(tmp_path, *(run(*beside(*cases), minute=minute) for minute in range(6)))
    assert compare.main([], tmp_path) == 0
    assert "FAILED" not in capsys.readouterr().out
    slower(newest, "loss[10]", 1.13)
    assert compare.main([], tmp_path) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert failed == [
        "FAILED: losses: loss[10], Weft: 0.885 (0.867 to 0.903); torch over it 100.000 before, 88.496 now; "
        "0.01 ms before, 0.0113 ms now: "
        "under 0.9, and beyond the noise"
    ]


def test_a_slowdown_of_a_whole_group_fails_with_each_case_and_its_numbers() -> None:
    old = run(*beside(case("a"), case("b"), case("c", group="others")))
    new = beside(case("a", median=1.06e-3), case("b", median=1.07e-3), case("c", group="others"))
    found = compared(run(*new), old)
    (failure,) = found.failures
    told = "losses: the geometric mean of Weft's ratios is 0.939, under 0.95, and beyond the noise"
    assert failure.splitlines()[0] == told
    assert [line.split(";")[0] for line in failure.splitlines()[1:]] == [
        "    losses: a, Weft: 0.943 (0.925 to 0.962)",
        "    losses: b, Weft: 0.935 (0.916 to 0.953)",
    ]


@pytest.mark.parametrize(
    ("cases", "failures"), [pytest.param(3, 0, id="few-within-it"), pytest.param(30, 1, id="many-beyond-it")]
)
def test_the_noise_of_a_group_falls_with_the_number_of_its_cases(cases: int, failures: int) -> None:
    """The group's mean ratio is 0.93. Each case has noise of 10% in both runs: 12% for a mean of 3, 4% for 30."""

    def noisy(median: float) -> list[Case]:
        wide = {"seconds_median": median, "seconds_p20": 0.9 * median, "seconds_p80": 1.1 * median}
        return beside(*(case(f"loss[{number}]", **wide) for number in range(cases)))

    assert len(compared(run(*noisy(1e-3 / 0.93)), run(*noisy(1e-3))).failures) == failures


@pytest.mark.parametrize(
    ("ratio", "failures"),
    [
        pytest.param(0.95, 0, id="at-the-edge"),
        pytest.param(0.9499, 1, id="group"),
        pytest.param(1.2, 0, id="faster"),
        pytest.param(0.89, 2, id="group-and-case"),
    ],
)
@pytest.mark.parametrize("cases", [1, 3, 7])
def test_times_are_held_to_their_least_ratios(ratio: float, failures: int, cases: int) -> None:
    names = [f"loss[{number}]" for number in range(cases)]
    old, new = (
        run(*beside(*(case(name, median=(number + 1) * 1e-3 / pace) for number, name in enumerate(names))))
        for pace in (1, ratio)
    )
    assert len(compared(new, old).failures) == (1 + cases if failures == 2 else failures)


@pytest.mark.parametrize(
    ("ratio", "p20", "fails"),
    [
        pytest.param(0.90, 1.08e-3, False, id="at-the-edge"),
        pytest.param(0.89, 1.08e-3, True, id="intervals-apart"),
        pytest.param(0.89, 1.01e-3, False, id="intervals-touch"),
        pytest.param(0.50, 1.00e-3, False, id="intervals-overlap"),
    ],
)
def test_one_case_fails_beyond_the_noise_alone(ratio: float, p20: float, fails: bool) -> None:
    old = run(*beside(case(), *(case(f"fast[{number}]") for number in range(9))))
    fast = [case(f"fast[{number}]", median=0.8e-3) for number in range(9)]
    new = run(*beside(case(median=1e-3 / ratio, seconds_p20=p20), *fast))
    assert bool(compared(new, old).failures) == fails


def test_baselines_and_times_of_the_host_may_be_slower() -> None:
    def cases(median: float) -> list[Case]:
        seconds = {"seconds_median": median}
        host = Case(name="step", group="losses", way="Weft", kind="host_time", status="measured", figures=seconds)
        return [case("loss", "Liger", median), case("loss", "Weft-like", median), *beside(host)]

    found = compared(run(*cases(9e-3)), run(*cases(1e-3)))
    assert not found.failures
    assert [(each.slower, str(each).endswith("ms now of the host")) for each in found.changes] == [(True, True)]


def test_the_forms_of_weft_are_held_to_the_budgets_too() -> None:
    found = compared(run(*beside(case(way="Weft, one shard", median=2e-3))), run(*beside(case(way="Weft, one shard"))))
    assert all("Weft, one shard: 0.500" in failure for failure in found.failures) and found.failures


@pytest.mark.parametrize(
    ("name", "way", "counts", "failures"),
    [
        pytest.param("traffic", "Weft", 6.05, [], id="at-the-edge"),
        pytest.param("traffic", "Weft", 6.06, ["bytes is 6.06, above its budget of 6.05"], id="above"),
        pytest.param("traffic", "Weft, one shard", 7, ["bytes is 7, above its budget of 6.05"], id="a-form-of-weft"),
        pytest.param("traffic", "Liger", 10, [], id="a-baseline"),
        pytest.param("other", "Weft", 10, [], id="another-case"),
    ],
)
def test_counted_figures_are_held_to_their_budgets_without_a_history(
    name: str, way: str, counts: float, failures: list[str]
) -> None:
    found = compared(run(counted(name, way, bytes=counts)))
    assert found.failures == tuple(f"counts: {name}, {way}: {failure}" for failure in failures)
    unmet = "no case has the figure of the budget 'traffic bytes'"
    assert (unmet in found.notes) == (name != "traffic" or way == "Liger")


@pytest.mark.parametrize(
    ("now", "told"),
    [
        pytest.param(unmeasured(error="out of\nmemory"), r"and now failed: out of\nmemory", id="failed"),
        pytest.param(unmeasured(), "and now failed: no error was told", id="failed-in-silence"),
        pytest.param(unmeasured(status="absent"), "and now absent", id="absent"),
        pytest.param(case("another"), "and now gone; if it is to stay so, name it in `retired`", id="gone"),
    ],
)
def test_a_case_that_was_measured_is_not_lost(now: Case, told: str) -> None:
    (failure,) = compared(run(now, minute=3), run(case(), minute=1), run(unmeasured(), minute=2)).failures
    assert failure.startswith("losses: loss, Weft: measured in the run of 2026-03-01T12:01:00Z, commit 0123456789, and")
    assert told in failure


@pytest.mark.parametrize(
    ("before", "now", "notes"),
    [
        pytest.param(case("old"), None, 0, id="retired"),
        pytest.param(case(way="Weft, given away"), case(), 0, id="a-way-retired"),
        pytest.param(case(way="CCE"), unmeasured(way="CCE", status="absent"), 1, id="a-baseline-not-installed"),
        pytest.param(unmeasured(), unmeasured(), 0, id="failed-before"),
        pytest.param(unmeasured(), None, 0, id="never-measured"),
    ],
)
def test_a_case_may_be_missing_where(before: Case, now: Case | None, notes: int) -> None:
    found = compared(run(case("else"), *([now] if now else [])), run(case("else"), before))
    assert not found.failures
    assert len(found.notes) == 1 + notes  # and of the budget without a figure


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        pytest.param([], ["others: step", "losses: loss, CCE", "losses: linear loss"], id="all"),
        pytest.param(["--only-measured"], ["losses: loss, CCE", "losses: linear loss"], id="only-measured"),
    ],
)
def test_a_run_of_some_benchmarks_loses_no_case_of_further_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], lost: list[str]
) -> None:
    """A case is lost if the run has measured the group without the case, with or without `--only-measured`."""
    left_out = run(case("step", group="others"), minute=0)
    whole = run(case("step", group="others"), *beside(case()), case(way="CCE"), case("linear loss"), minute=1)
    history_in(tmp_path, left_out, whole, run(*beside(case(median=2e-3)), minute=2))
    assert compare.main(options, tmp_path) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    gone = [line for line in failed if "and now gone" in line]
    assert sorted(
        line.removeprefix("FAILED: ").split(": measured")[0].replace(", Weft", "") for line in gone
    ) == sorted(lost)
    assert len(failed) == len(gone) + 2  # and slower in either


def test_before_is_the_median_of_the_five_runs_before(tmp_path: Path) -> None:
    medians = [9.0, 9.0, 5.0, 1.0, 3.0, 2.0, 4.0, 7.0, 9.0]
    runs = [run(*beside(case(median=median), torch=1.0), minute=minute) for minute, median in enumerate(medians)]
    history_in(tmp_path, *runs)
    run(case(median=1.0), minute=7, device="NVIDIA A100").write(tmp_path / "NVIDIA-A100")
    new = runs[7]
    old, unreadable = compare.before(new, tmp_path)
    assert old == runs[2:7] and not unreadable
    (change,) = compare.changes(new, old)
    before, now = (Spread(1 / (1.01 * each), 1 / each, 1 / (0.99 * each)) for each in (3, 7))
    noise = (now.p20 / before.p80, now.p80 / before.p20)
    assert change == Change(case=new.cases[0], seconds=3, baseline="torch", before=before, now=now, noise=noise)
    assert change.ratio == pytest.approx(3 / 7)


def spread(seconds: list[float]) -> dict[str, Any]:
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return {"seconds_median": statistics.median(seconds), "seconds_p20": fifths[0], "seconds_p80": fifths[3]}


def noise_of_pairs() -> list[float]:
    """Relative noise of a busy host: half of p20 to p80, of every fourth layout change in the history."""
    newest = list(history.runs("cpu").runs.values())[-1]
    pairs = [case.seconds for case in newest.cases if case.group == "reshard_time" and case.ours]
    return [(each.p80 - each.p20) / each.median / 2 for each in pairs][::4]


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param([0.002, 0.005, 0.01, 0.02], id="a-gpu"),
        pytest.param([0.03], id="one-noisy-case"),
        pytest.param(None, id="a-busy-host"),
    ],
)
def test_noise_alone_never_fails(noise: list[float] | None) -> None:
    relative, generator = noise or noise_of_pairs(), random.Random(7)

    def measured(number: int) -> Run:
        """The 20th percentile of a normal distribution is 0.84 deviations below its median."""
        seconds = [[1e-3 * math.exp(generator.gauss(0, each / 0.84)) for _ in range(ROUNDS)] for each in relative]
        cases = (case(f"loss[{n}]", **spread(each)) for n, each in enumerate(seconds))
        return run(*beside(*cases), minute=number % 60)

    runs = [measured(number) for number in range(205)]
    for end in range(5, 205):
        assert not compared(runs[end], *runs[end - 5 : end]).failures


def test_runs_of_several_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run().write(tmp_path), run(device="NVIDIA A100", minute=1).write(tmp_path)
    assert compare.main([str(one), "--against", str(one), str(other)], tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("the run is of 'NVIDIA H200', those before are of 'NVIDIA A100'; give runs of one device")


def test_without_a_history_there_is_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([], tmp_path) == 0
    assert capsys.readouterr().out == f"No history in {tmp_path}: nothing to compare.\n"
    history_in(tmp_path, run())
    assert compare.main([], tmp_path) == 0
    assert "No history of this device before it" in capsys.readouterr().out


def test_a_run_and_those_before_it_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = history_in(tmp_path, *(run(*beside(case(median=1 + m)), minute=m) for m in range(3)))
    assert compare.main([str(first)], tmp_path) == 0
    assert compare.main([str(second)], tmp_path) == 1
    assert compare.main([str(second), "--against", str(third)], tmp_path) == 0
    assert "1.500 (1.470 to 1.530)" in capsys.readouterr().out


def test_the_rest_of_the_history_is_used_where_a_file_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = history_in(tmp_path, *(run(minute=minute) for minute in range(3)))
    files[0].write_text("")
    assert compare.main([], tmp_path) == 0
    out, err = capsys.readouterr()
    assert "beside 1 earlier runs" in out
    assert (
        err == f"not read: {files[0]}: it is empty; remove the file, or add the run anew from pytest-benchmark's JSON\n"
    )
    files[2].write_text("{")  # the newest: another would answer another question
    assert compare.main([], tmp_path) == 2
    assert str(files[2]) in capsys.readouterr().err


def test_the_budgets_of_the_repository_are_read() -> None:
    budgets = Budgets.read()
    assert (budgets.group, budgets.case) == (0.95, 0.90)
    assert budgets.counts["cross_entropy bytes_a_logit"] == 6.05


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("[time", "Expected ']'", id="no-toml"),
        pytest.param("retired = []\n[counts]", "'time' is missing", id="no-times"),
        pytest.param("retired = []\n[counts]\n[time]\ngroup = 0.9", "'case' is missing", id="no-case"),
        pytest.param("[counts]\nx = 'y'\n[time]\ngroup = 0.9\ncase = 0.9", "could not convert", id="a-word"),
    ],
)
def test_budgets_that_cannot_be_read_are_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    (file := tmp_path / "budgets.toml").write_text(content)
    assert compare.main([], tmp_path, file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and told in line


def by_host(median: float, way: str = "Weft", **rest: Any) -> Case:
    """A time of the host."""
    return replace(case(way=way, median=median, **rest), kind="host_time")


OTHER = {"cpu": "AMD EPYC 7763", "cores": 4, "load": 0.1}


class TestMachines:
    """Times are compared on one machine alone: a host's by its CPU and cores, a kernel's by its GPU."""

    def test_times_of_another_host_are_no_history(self) -> None:
        old = [run(by_host(1e-3), minute=0), run(by_host(9e-3), minute=1, machine=OTHER)]
        found = compared(run(by_host(2e-3), minute=2), *old)
        assert [(change.seconds, change.ratio) for change in found.changes] == [(1e-3, 0.5)]
        assert found.notes[-1] == "times of the host are not compared with 1 of another machine, of 2 earlier runs"

    @pytest.mark.parametrize("machine", [{}, {"cpu": "AMD EPYC 9654"}, {"cores": 8}])
    def test_an_unrecorded_machine_is_compared_with_none(self, machine: dict[str, Any]) -> None:
        untold = [run(by_host(1e-3), minute=minute, machine=machine) for minute in range(2)]
        assert compared(untold[1], untold[0]).changes == ()
        assert compared(untold[1], untold[0]).notes[-1].endswith("the run's machine was not recorded")
        found = compared(run(by_host(1e-3), minute=2), *untold)
        assert (found.changes, found.notes[-1]) == (
            (),
            "times of the host are not compared with 2 of a machine that was not recorded, of 2 earlier runs",
        )

    def test_the_load_makes_no_other_machine(self) -> None:
        busy = run(by_host(1e-3), machine={"cpu": "AMD EPYC 9654", "cores": 8, "load": 7.5})
        assert len(compared(run(by_host(1e-3), minute=1), busy).changes) == 1

    def test_a_kernel_is_compared_on_its_gpu_whatever_the_host(self) -> None:
        found = compared(run(case(), minute=1), run(case(), machine=OTHER))
        assert (len(found.changes), found.notes) == (1, ("no case has the figure of the budget 'traffic bytes'",))

    def test_five_runs_of_the_machine_are_taken_though_others_lie_between(self, tmp_path: Path) -> None:
        runs = [run(by_host(1e-3 * (1 + at)), minute=at, machine=OTHER if at % 2 else MACHINE) for at in range(14)]
        history_in(tmp_path, *runs)
        old, _ = compare.before(runs[-2], tmp_path)
        (change,) = compared(runs[-2], *old).changes
        assert change.seconds == statistics.median(1e-3 * (1 + at) for at in (2, 4, 6, 8, 10))

    def test_a_case_that_is_gone_is_missed_on_any_machine(self) -> None:
        found = compared(run(counted(bytes=1)), run(counted(bytes=1), counted("rest"), machine=OTHER))
        assert [failure.partition(":")[0] for failure in found.failures] == ["counts"]

    def test_the_machine_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        history_in(tmp_path, run())
        assert compare.main([], tmp_path) == 0
        assert "\non AMD EPYC 9654, 8 cores, load 0.25\n" in capsys.readouterr().out


def test_counted_figures_that_changed_are_those_of_weft_beside_the_newest_that_has_them() -> None:
    old = [
        run(counted(bytes=8, flop=3, step_001=1.0), counted(way="Liger", bytes=1), minute=0),
        run(counted(bytes=6, flop=3, step_001=1.0), counted(way="Liger", bytes=2), machine=OTHER, minute=1),
        run(counted("else", bytes=6), minute=2),
    ]
    found = compared(run(counted(bytes=9, flop=3, step_001=2.0), counted(way="Liger", bytes=3), minute=3), *old)
    assert [(each.label, each.before, each.now, each.growth) for each in found.counts] == [("bytes", 6, 9, 1.5)]


def test_collectives_and_memory_are_counted_beside_times() -> None:
    old, new = (run(by_host(1e-3, collectives=number, registers=number)) for number in (21, 22))
    assert [(each.label, each.growth) for each in compared(new, old).counts] == [("collectives", 22 / 21)]
