"""Compares a run with earlier runs on the same device: `./run benchmark_compare [NEW] [--only-measured]`.

A time is judged by its baselines: other implementations, timed in turn with Weft in the same run. The baseline's time
over Weft's is the case's ratio. The ratio's spread runs from the baseline's 20th percentile over Weft's 80th to the
baseline's 80th over Weft's 20th. A case has changed if, for each baseline, the spread now and the median spread of the
last five runs do not overlap. A slower machine slows Weft and baselines alike, and changes no ratio. A time without a
baseline is shown and never judged. Counted figures are exact: every difference is a change.

Times of kernels are compared on the same GPU model, times of a host on the same CPU model with the same number of
cores. A run without a recorded machine is compared with no run. budgets.toml has the limits; the exit status is 1 if a
limit is exceeded.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import history
from benchmarks.figures import TIMES
from benchmarks.record import Case, HistoryError, Run, Spread, naming, printable, taken

BUDGETS = Path(__file__).parent / "budgets.toml"
RUNS = 5
EXACT = ("collectives", "peak_bytes")  # counted figures of timed cases
UNKNOWN = Spread(0, 1, math.inf)  # the ratio where there is no baseline
ROUNDING = 1e-9  # of quotients and their mean: a run at the edge passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """group, case: least ratios of times. counts: "NAME KEY" -> a figure's limit. retired: "NAME" or "NAME, WAY"."""

    group: float
    case: float
    counts: Mapping[str, float]
    retired: frozenset[str]

    @classmethod
    def read(cls, file: Path = BUDGETS) -> Budgets:
        """Raises HistoryError."""
        with naming(file, "write it as benchmarks/budgets.toml is in git"):
            raw = tomllib.loads(file.read_text())
            time, counts = taken(raw, "time", dict), taken(raw, "counts", dict)
            least = {name: taken(time, name, float) for name in ("group", "case")}
            most = {name: float(value) for name, value in counts.items()}
            return cls(**least, counts=most, retired=frozenset(taken(raw, "retired", list)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A time of Weft's, now and before, judged by the baseline whose ratio moved the least.

    baseline: the name of this baseline; None where no baseline was timed in both runs.
    before, now: the baseline's time over Weft's.
    noise: the least and the greatest now / before, by the spreads of the ratios to all baselines.
    """

    case: Case
    seconds: float  # Weft's median before
    baseline: str | None = None
    before: Spread = UNKNOWN
    now: Spread = UNKNOWN
    noise: tuple[float, float] = (0, math.inf)

    @property
    def ratio(self) -> float:
        """Below 1 if Weft is slower now: relative to the baseline, or by the clock where there is no baseline."""
        return self.now.median / self.before.median if self.baseline else self.seconds / self.case.seconds.median

    @property
    def slower(self) -> bool:
        return self.noise[1] < 1

    @property
    def faster(self) -> bool:
        return self.noise[0] > 1

    @property
    def word(self) -> str:
        if self.baseline is None:
            return "not judged"
        return "slower" if self.slower else "faster" if self.faster else "within the spread"

    def __str__(self) -> str:
        times = f"{self.seconds * 1e3:.4g} ms before, {self.case.seconds.median * 1e3:.4g} ms now"
        clock = " of the host" if self.case.kind == "host_time" else ""
        if self.baseline is None:
            return f"{self.case.title}: no baseline beside it, not judged; {times}{clock}"
        moved = f"{printable(self.baseline)} over it {self.before.median:.3f} before, {self.now.median:.3f} now"
        low, high = self.noise
        return f"{self.case.title}: {self.ratio:.3f} ({low:.3f} to {high:.3f}); {moved}; {times}{clock}"


@dataclass(frozen=True, slots=True)
class Count:
    """A counted figure of Weft's, before and now."""

    case: Case
    label: str
    before: float
    now: float

    @property
    def growth(self) -> float:
        """Now over before: above 1 if the figure has grown."""
        return self.now / self.before if self.before else math.inf


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside earlier runs.

    changes: of every time of Weft's that earlier runs have, too.
    counts: counted figures of Weft's, where the newest earlier run with the figure has a different number.
    failures: lines about exceeded budgets and lost cases.  notes: further lines to print.
    """

    changes: tuple[Change, ...]
    counts: tuple[Count, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def changes(new: Run, old: Sequence[Run]) -> list[Change]:
    """Each time of Weft's in `new`, beside the median over the runs of `old` with this time. Raises HistoryError."""
    if others := {run.device for run in old} - {new.device}:
        told = ", ".join(sorted(map(repr, others)))
        raise HistoryError(f"the run is of {new.device!r}, those before are of {told}; give runs of one device")
    now, before = _timed(new), {kind: list(map(_timed, timed_alike(new, old, kind))) for kind in TIMES}
    return [
        _change(case, now[key], [cases[key] for cases in before[case.kind] if case.way in cases.get(key, {})])
        for key, ways in now.items()
        for case in ways.values()
        if case.ours and any(case.way in cases.get(key, {}) for cases in before[case.kind])
    ]


def _timed(run: Run) -> dict[tuple[str, str, str], dict[str, Case]]:
    """The timed cases by group, name and kind, then by way."""
    found: dict[tuple[str, str, str], dict[str, Case]] = {}
    for case in (case for case in run.cases if case.timed):
        found.setdefault((case.group, case.name, case.kind), {})[case.way] = case
    return found


def baselines(case: Case, ways: Mapping[str, Case]) -> dict[str, Spread]:
    """For each baseline timed beside a case of Weft's: the baseline's time over the case's."""
    return {way: each.seconds.over(case.seconds) for way, each in ways.items() if not each.ours}


def _change(case: Case, now: Mapping[str, Case], before: Sequence[Mapping[str, Case]]) -> Change:
    """The Change of a case. before: for each earlier run with the case, the cases of all ways."""
    seconds = statistics.median(ways[case.way].seconds.median for ways in before)
    then = [baselines(ways[case.way], ways) for ways in before]
    found = [
        (way, _median([ratios[way] for ratios in then if way in ratios]), ratio)
        for way, ratio in baselines(case, now).items()
        if any(way in ratios for ratios in then)
    ]
    if not found:
        return Change(case=case, seconds=seconds)
    moved = [after.over(earlier) for _, earlier, after in found]
    way, earlier, after = min(found, key=lambda each: round(abs(math.log(each[2].median / each[1].median)), 9))
    noise = min(each.p20 for each in moved), max(each.p80 for each in moved)
    return Change(case=case, seconds=seconds, baseline=way, before=earlier, now=after, noise=noise)


def sentence(found: Sequence[Change]) -> str:
    """A sentence with the number of changed times, of all times with a baseline."""
    judged = [change for change in found if change.baseline]
    if not judged:
        return "no time is compared"
    slower, faster = sum(change.slower for change in judged), sum(change.faster for change in judged)
    if not slower + faster:
        return f"nothing changed beyond what the machine does, of {len(judged)} times beside their baselines"
    return f"beside their baselines {slower or 'none'} of {len(judged)} times slowed down, {faster or 'none'} sped up"


def same_clock(one: Run, other: Run, kind: str) -> bool:
    """Whether both runs took times of this kind on the same, recorded machine."""
    return one.clock(kind) is not None and one.clock(kind) == other.clock(kind)


def timed_alike(new: Run, old: Sequence[Run], kind: str) -> list[Run]:
    """The runs to compare with `new` in times of this kind: the last five on the same machine."""
    return [run for run in old if same_clock(new, run, kind)][-RUNS:]


def counted(case: Case) -> dict[str, float]:
    """The counted figures of a measured case: all numbers of a counted case, and EXACT of a timed case."""
    if case.status != "measured":
        return {}
    return {
        label: value
        for label, value in case.numbers.items()
        if not label.startswith("seconds") and (case.kind == "count" or label in EXACT)
    }


def counts(new: Run, old: Sequence[Run]) -> list[Count]:
    """The changed counted figures of Weft's, without points of curves. A count does not depend on the machine."""
    before: dict[tuple[str, str, str], Case] = {}
    for case in (case for run in old for case in run.cases if case.status == "measured"):
        before[case.key] = case  # the newest stays
    return [
        Count(case, label, before[case.key].numbers[label], now)
        for case in new.cases
        if case.ours and case.key in before
        for label, now in counted(case).items()
        if before[case.key].numbers.get(label, now) != now
    ]


def compare(new: Run, old: Sequence[Run], budgets: Budgets) -> Comparison:
    """`new` beside `old`, by the budgets. Raises HistoryError for runs of several devices."""
    found = changes(new, old)
    lost, absent = _lost(new, old, budgets.retired)
    over, unmet = _counted(new, budgets.counts)
    notes = (*absent, *unmet, *_of_others(new, old))
    return Comparison(tuple(found), tuple(counts(new, old)), (*_slower(found, budgets), *over, *lost), notes)


def _of_others(new: Run, old: Sequence[Run]) -> list[str]:
    """Runs whose times of a host are not compared, and why."""
    if not any(case.timed and case.kind == "host_time" for case in new.cases):
        return []
    others = [run for run in old if not same_clock(new, run, "host_time")]
    if not others:
        return []
    if new.clock("host_time") is None:
        return ["no time of the host is compared: the run's machine was not recorded"]
    untold = sum(run.clock("host_time") is None for run in others)
    told = [f"{len(others) - untold} of another machine"] * (len(others) > untold)
    told += [f"{untold} of a machine that was not recorded"] * (untold > 0)
    return [f"times of the host are not compared with {' and '.join(told)}, of {len(old)} earlier runs"]


def _slower(found: Sequence[Change], budgets: Budgets) -> list[str]:
    groups: dict[str, list[Change]] = {}
    for change in found:
        if change.baseline and change.case.kind == "time":
            groups.setdefault(change.case.group, []).append(change)
    lines = []
    for group, members in groups.items():
        mean, high = _mean(members)
        if mean < budgets.group * (1 - ROUNDING) and high < 1:
            told = f"the geometric mean of Weft's ratios is {mean:.3f}, under {budgets.group}, and beyond the noise"
            lines.append("\n    ".join([f"{printable(group)}: {told}", *map(str, members)]))
        lines += [
            f"{change}: under {budgets.case}, and beyond the noise"
            for change in members
            if change.ratio < budgets.case * (1 - ROUNDING) and change.slower
        ]
    return lines


def _mean(members: Sequence[Change]) -> tuple[float, float]:
    """The geometric mean of n ratios, and the upper end of the mean's noise: sqrt(sum of squared noises) / n."""
    mean = statistics.geometric_mean(change.ratio for change in members)
    halves = [math.log(high / low) / 2 for low, high in (change.noise for change in members)]
    return mean, mean * math.exp(math.hypot(*halves) / len(members))


def _counted(new: Run, counts: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Lines about figures of Weft's above the budget, and about budgets without a figure."""
    over, met = [], set()
    for case in (case for case in new.cases if case.ours and case.status == "measured"):
        for key, value in case.numbers.items():
            budget = f"{case.name} {key}"
            met.add(budget)
            if value > counts.get(budget, value):
                over.append(f"{case.title}: {key} is {value:.6g}, above its budget of {counts[budget]:.6g}")
    return over, [f"no case has the figure of the budget {name!r}" for name in counts if name not in met]


def _lost(new: Run, old: Sequence[Run], retired: frozenset[str]) -> tuple[list[str], list[str]]:
    """Lines about cases measured before which now failed or are gone, and about baselines not installed now."""
    before = {case.key: (case, run) for run in old for case in run.cases if case.status == "measured"}
    now = {case.key: case for case in new.cases}
    lost: list[str] = []
    absent: list[str] = []
    for key, (case, run) in before.items():
        status = now[key].status if key in now else "gone"
        outcome = now[key].outcome if key in now else status
        told = f"{case.title}: measured in the run of {run.time}, commit {run.commit[:10]}, and now {outcome}"
        if status == "failed":
            lost.append(told)
        elif status == "gone" and not {case.name, f"{case.name}, {case.way}"} & retired:
            lost.append(f"{told}; if it is to stay so, name it in `retired` of budgets.toml")
        elif status == "absent":
            (lost if case.ours else absent).append(told)
    return lost, absent


def _median(spreads: Sequence[Spread]) -> Spread:
    p20, median, p80 = (statistics.median(getattr(each, name) for each in spreads) for name in ("p20", "median", "p80"))
    return Spread(p20, median, p80)


def newest(results: Path = history.RESULTS) -> Run | None:
    """The newest run of all devices. Raises HistoryError if this run cannot be read; no older run takes the place."""
    files = sorted(results.glob(f"*/{history.RUN_FILES}"), key=lambda file: file.name)  # which begins with the time
    return history.read(files[-1]) if files else None


def before(new: Run, results: Path = history.RESULTS) -> tuple[list[Run], tuple[str, ...]]:
    """The earlier runs on the device of `new`, for `beside`; and a line for each unreadable file."""
    found = history.runs(new.device, results)
    return beside(new, [run for run in found.runs.values() if run != new and run.time <= new.time]), found.unreadable


def beside(new: Run, earlier: Sequence[Run]) -> list[Run]:
    """The last five of `earlier`, and the last five on the machine of `new`, oldest first."""
    of_its_machine = timed_alike(new, earlier, "host_time")
    return [run for run in earlier if run in (*earlier[-RUNS:], *of_its_machine)]


def of_groups(new: Run, old: Sequence[Run]) -> list[Run]:
    """`old` with the groups measured in `new` alone, so that groups left out by -k are not lost; without empty runs."""
    groups = {case.group for case in new.cases}
    kept = [(run, tuple(case for case in run.cases if case.group in groups)) for run in old]
    return [replace(run, cases=cases) for run, cases in kept if cases]


def main(arguments: Sequence[str] | None = None, results: Path = history.RESULTS, budgets_file: Path = BUDGETS) -> int:
    parser = argparse.ArgumentParser(prog="./run benchmark_compare", description="Compares a run with those before it.")
    parser.add_argument("new", nargs="?", type=Path, help="a run's file; the newest of the history without it")
    parser.add_argument("--against", nargs="+", type=Path, default=[], metavar="OLD", help="not the five runs before")
    only = "only the groups that the run has, as for a run of some benchmarks (-k NAME); others do not count as gone"
    parser.add_argument("--only-measured", action="store_true", help=only)
    options = parser.parse_args(arguments)
    try:
        budgets = Budgets.read(budgets_file)
        new = history.load(options.new) if options.new else newest(results)
        if new is None:
            print(f"No history in {results}: nothing to compare.")
            return 0
        old, unreadable = before(new, results)
        if options.against:
            old, unreadable = [history.load(file) for file in options.against], ()
        if options.only_measured:
            old = of_groups(new, old)
        comparison = compare(new, old, budgets)
    except HistoryError as error:
        print(f"benchmark_compare: {error}", file=sys.stderr)
        return 2
    for line in unreadable:
        print(f"not read: {line}", file=sys.stderr)
    print(
        f"{new.device}, commit {new.commit[:10]}, {new.time}, beside {len(old)} earlier runs; now / before, of "
        "the baseline's time over Weft's (the least and the most by p20 to p80)"
    )
    print(f"on {new.where}")
    if not old:
        print("No history of this device before it: only the budgets of counted figures are checked.")
    for change in comparison.changes:
        print(f"  {change}")
    for note in comparison.notes:
        print(f"note: {note}")
    for failure in comparison.failures:
        print(f"FAILED: {failure}")
    print(f"{sentence(comparison.changes)}; {len(comparison.failures)} failures")
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
