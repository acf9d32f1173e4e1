"""What changed in the newest run since the runs before, the worst first; the budgets' verdict; ratios over the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.compare import RUNS, Change, Comparison, baselines, counted, sentence, timed_alike
from benchmarks.dashboard.charts import Datum, Figure, axis, lines
from benchmarks.dashboard.figures import groups, is_rival, title_of
from benchmarks.dashboard.sources import Device
from benchmarks.dashboard.tables import named, several, short, times
from benchmarks.figures import TIMES, ordered, quantity
from benchmarks.record import Case, Run, printable

COMPILED = "compiled"  # the group of what the compiler counts, which says little of how fast a kernel is
CLOCKS = {"time": ("Kernel times", "of this GPU"), "host_time": ("Host times", "on this machine")}


class Line(NamedTuple):
    """One changed figure. growth: above 1 is worse.  broken: over its budget.  past: a small chart over the runs."""

    group: str
    growth: float
    broken: bool
    word: str
    name: str
    of: str
    moved: str  # from what to what
    clock: str
    past: Figure | None

    @property
    def shown(self) -> str:
        if self.growth in (0, math.inf):
            return "from 0" if self.growth else "to 0"
        return times(max(self.growth, 1 / self.growth))


class Changed(NamedTuple):
    """The headline. beside: which runs were compared.  lines: worst first; compiled: the compiler's counts."""

    sentence: str
    beside: str = ""
    lines: Sequence[Line] = ()
    compiled: Sequence[Line] = ()


class Verdict(NamedTuple):
    """By the budgets. word: "Passes", "Fails", "Not judged".  told: why.  lines: broken budgets and lost cases."""

    word: str
    told: str
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()


def changed(device: Device) -> Changed:
    where, found = "On a CPU" if device.newest.on_cpu else f"On {printable(device.name)}", device.comparison
    if found is None:
        return Changed(f"{where} nothing is compared: the budgets cannot be read.")
    if len(device.runs) == 1:
        return Changed(f"{where} there is one run, and none before it to compare with.")
    every = [*_times(device, found), *_counts(device, found)]
    every.sort(key=lambda line: (not line.broken, -round(line.growth, 4), line.name, line.of))
    shown = [line for line in every if line.group != COMPILED]
    counts = [line.growth > 1 for line in shown if line.clock == "counted"]
    told = f"counted figures: {sum(counts) or 'none'} grew, {len(counts) - sum(counts) or 'none'} fell"
    said = f"{where}, {sentence(found.changes)}; {told if counts else 'no counted figure changed'}."
    return Changed(said, _beside(device, found.changes), shown, [line for line in every if line.group == COMPILED])


def verdict(device: Device, budgets: int) -> Verdict:
    found = device.comparison
    if found is None:
        return Verdict("Not judged", "the budgets cannot be read.")
    if found.failures:
        first = printable(found.failures[0].partition("\n")[0])
        told = f"{several(len(found.failures), 'budget')} broken by the newest run, the first by {first}."
        return Verdict("Fails", told, found.failures, found.notes)
    kernels = sum(change.baseline is not None and change.case.kind == "time" for change in found.changes)
    earlier = several(min(len(device.runs) - 1, RUNS), "earlier run")
    beside = (
        f"{several(kernels, 'kernel time')} judged beside {earlier}" if kernels else f"nothing of {earlier} is lost"
    )
    met = budgets - sum(note.startswith("no case has the figure") for note in found.notes)
    kept = f"{met} of {several(budgets, 'budget')} of counted figures kept" if met else "no figure has a budget"
    told = f"{kept}; {beside if len(device.runs) > 1 else 'there is no earlier run'}."
    return Verdict("Passes" if met or found.changes else "Not judged", told, (), found.notes)


def _times(device: Device, found: Comparison) -> Iterator[Line]:
    """A line for each time whose ratio to its baselines changed."""
    for change in (each for each in found.changes if each.slower or each.faster):
        case, baseline = change.case, change.baseline or ""
        of = f"{named(TIMES[case.kind])}, {baseline} ÷ {case.way}"
        moved = " → ".join(times(each.median) for each in (change.before, change.now))
        clock = " → ".join(quantity("time", each, 3) for each in (change.seconds, case.seconds.median))
        broken, points = _broken(found, f"{case.title}: "), _ratios(device, case, [baseline])
        yield Line(case.group, 1 / change.ratio, broken, change.word, case.name, of, moved, clock, _past(points))


def _counts(device: Device, found: Comparison) -> Iterator[Line]:
    """A line for each counted figure of Weft's that changed in the digits shown."""
    for each in found.counts:
        case, label = each.case, each.label
        numbers = [short(label, value) for value in (each.before, each.now)]
        if len(set(numbers)) > 1:
            points = [
                {"name": case.name, "x": at, "value": value, "tip": f"{_run(run)}: {quantity(label, value)}"}
                for at, run in enumerate(device.runs.values())
                for old in run.cases
                if old.key == case.key and (value := counted(old).get(label)) is not None
            ]
            broken, word = _broken(found, f"{case.title}: {label} is "), "more" if each.growth > 1 else "less"
            of, moved = f"{named(label)}, {case.way}", " → ".join(numbers)
            yield Line(case.group, each.growth, broken, word, case.name, of, moved, "counted", _past(points))


def _broken(comparison: Comparison, start: str) -> bool:
    """Whether a failure names this case; the failure of a group has a line for each of its cases."""
    return any(line.strip().startswith(start) for each in comparison.failures for line in each.splitlines())


def _past(points: Sequence[Datum]) -> Figure | None:
    values = [each[key] for each in points for key in ("low", "value", "high") if key in each]
    if len(points) < 2:
        return None
    scale = {**axis(values, log=min(values) > 0), "axis": None}
    return lines(points[0]["name"], "over the runs", points, scale, None, height=34)


def _run(run: Run) -> str:
    return f"{run.time[:10]} {run.commit[:7]}"


def _ratios(device: Device, case: Case, ways: Sequence[str]) -> list[Datum]:
    """Points of a case over the runs: a baseline's time over the case's; of `ways`, the first baseline of each run."""
    found, newest = [], device.newest.clock(case.kind)
    for at, run in enumerate(device.runs.values(), 1):
        beside = {
            each.way: each
            for each in run.cases
            if each.timed and (each.key[:2], each.kind) == (case.key[:2], case.kind)
        }
        ratios, clock = baselines(beside[case.way], beside) if case.way in beside else {}, run.clock(case.kind)
        for way in [way for way in ways if way in ratios][:1]:
            (low, high), value = ratios[way].ends, ratios[way].median
            tip = f"{case.name}, {way} ÷ {case.way}, {_run(run)}: {times(value)}"
            point = {"name": f"{case.name}, {case.way}", "x": at, "low": low, "value": value, "high": high, "tip": tip}
            found.append({**point, "part": str(clock or at), "here": clock == newest})
    return found


def history(device: Device) -> Iterator[Figure]:
    """A chart for each group of times: a line for each case, its first baseline's time over Weft's."""
    runs = len(device.runs)
    values = list(range(runs, 0, -math.ceil(runs / 10)))
    across = {"axis": {"title": "run", "grid": False, "values": values}, "scale": {"domain": [1, runs], "padding": 6}}
    for group, kind, cases in groups(device.newest):
        rivals = [case for case in cases if case.timed and is_rival(case, cases)]
        points = []
        for case in (case for case in rivals if case.ours):
            others = ordered(each.way for each in rivals if each.name == case.name and not each.ours)
            points += [{**each, "low": None, "high": None} for each in _ratios(device, case, others)]
        if len({each["x"] for each in points}) > 1:
            count = several(len({each["name"] for each in points}), "case")
            scale = axis([0.9, 1.1, *(each["value"] for each in points)], "×")
            yield lines(
                title_of(group, kind),
                f"{count}; the baseline's time over Weft's, more is better",
                points,
                scale,
                across,
            )


def _beside(device: Device, found: Sequence[Change]) -> str:
    """Which runs times were compared with, and which times were not compared."""
    earlier = list(device.runs.values())[:-1]
    own = [case for case in device.newest.cases if case.timed and case.ours]
    told = []
    for kind in (kind for kind in CLOCKS if any(case.kind == kind for case in own)):
        what, where = CLOCKS[kind]
        runs = len(timed_alike(device.newest, earlier, kind))
        why = "other runs are of other machines, or of none that was recorded"
        why = why if device.newest.clock(kind) else "the machine of this run was not recorded"
        told.append(
            f"{what} beside the median of {several(runs, 'run')} {where}" if runs else f"{what} are not compared: {why}"
        )
    if alone := sum(each.baseline is None for each in found):
        told.append(f"{several(alone, 'time')} without a baseline: shown below, not judged")
    if found and len(own) > len(found):
        told.append(f"{several(len(own) - len(found), 'time')} for the first time here")
    return ". ".join([*told, "Counted figures beside the newest run before that has them"]) + "."
