"""A device's history: what changed beside the runs before, and each case's time over the runs, with its noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import Change
from benchmarks.dashboard import charts
from benchmarks.dashboard.charts import Spec
from benchmarks.dashboard.sources import Device
from benchmarks.dashboard.tables import Cell, Row, Table, spread_of, times
from benchmarks.figures import ordered, place, quantity
from benchmarks.record import Case, Run, printable

KINDS = {"time": "time", "host_time": "host time"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One case over the runs. points: way (its place among `ways`), run, p20, median, p80."""

    title: str
    kind: str
    ways: tuple[str, ...]
    points: tuple[tuple[int, int, float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """told: in words.  spec: the chart without its data, which are those of the series that is chosen."""

    told: str
    runs: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    spec: Spec | None = None
    tables: tuple[Table, ...] = ()


def past(device: Device) -> Past:
    runs = list(device.runs.values())
    if len(runs) == 1:
        return Past(told="One run so far: a history starts with the second.")
    names = tuple(f"{run.time[:10]} {printable(run.commit[:7])}" for run in runs)
    series = tuple(_series(device))
    if not series:
        return Past(told=f"{len(runs)} runs, and no time in any of them.", runs=names)
    spec = charts.over_runs()
    tables = (_over_the_runs(device, names), *_beside_those_before(device))
    told = f"{len(runs)} runs. The line is the median of a run, the band goes from its 20th to its 80th percentile."
    return Past(told=told, runs=names, series=series, spec=spec, tables=tables)


def _series(device: Device) -> Iterator[Series]:
    """Of each case that the newest run times by Weft; kernels first."""
    newest = [case for case in device.newest.cases if case.timed]
    ours = {(case.kind, case.group, case.name) for case in newest if case.ours}
    for kind, group, name in sorted(ours, key=lambda key: (key[0] != "time", key)):
        ways = ordered(case.way for case in newest if (case.kind, case.group, case.name) == (kind, group, name))
        points = []
        for at, run in enumerate(device.runs.values()):
            for case in _timed(run, kind, group, name):
                if case.way in ways:
                    each = case.seconds
                    points.append((ways.index(case.way), at, each.p20, each.median, each.p80))
        title = f"{printable(name)} ({printable(group).replace('_', ' ')}, {KINDS[kind]})"
        yield Series(title=title, kind=KINDS[kind], ways=tuple(map(printable, ways)), points=tuple(points))


def _timed(run: Run, kind: str, group: str, name: str) -> list[Case]:
    return [case for case in run.cases if case.timed and (case.kind, case.group, case.name) == (kind, group, name)]


def _in_order(case: Case) -> tuple[bool, str, str, tuple[bool, bool, str]]:
    """Kernels first, and Weft before what it is compared with."""
    return case.kind != "time", case.group, case.name, place(case.way)


def _over_the_runs(device: Device, names: tuple[str, ...]) -> Table:
    newest = sorted((case for case in device.newest.cases if case.timed), key=_in_order)
    by_run = [{(case.key, case.kind): case for case in run.cases if case.timed} for run in device.runs.values()]
    rows = []
    for case in newest:
        found = [cases.get((case.key, case.kind)) for cases in by_run]
        cells = tuple(
            Cell(quantity("time", each.seconds.median), spread_of(each)) if each else Cell("not timed", missing=True)
            for each in found
        )
        heads = (printable(case.group), printable(case.name), printable(case.way), KINDS[case.kind])
        rows.append(Row(heads, cells))
    head = ("group", "case", "way", "clock", *names)
    return Table(
        name="history", caption="Median over the runs, oldest first, and p20 to p80", head=head, rows=tuple(rows)
    )


def _beside_those_before(device: Device) -> Iterator[Table]:
    if device.comparison is None or not device.comparison.changes:
        return
    changes = sorted(device.comparison.changes, key=lambda change: _in_order(change.case))
    rows = tuple(map(_changed, changes))
    yield Table(
        name="changes",
        caption=f"The newest run beside the median of {device.earlier} before it; above 1 is faster now",
        head=("group", "case", "way", "clock", "before", "now", "before / now", "in words"),
        rows=rows,
    )


def _changed(change: Change) -> Row:
    case, (low, high) = change.case, change.noise
    word = "faster" if low > 1 else "slower" if high < 1 else "within the noise"
    heads = (printable(case.group), printable(case.name), printable(case.way), KINDS[case.kind])
    before, now = (quantity("time", each) for each in (change.before.median, case.seconds.median))
    ratio = Cell(times(change.ratio).removesuffix("×"), f"{low:.2f} to {high:.2f}")
    return Row(heads, (Cell(before), Cell(now), ratio, Cell(word)))


def as_data(found: Past) -> dict[str, Any]:
    """What the page's script chooses from."""
    series = [{"kind": each.kind, "ways": each.ways, "points": each.points} for each in found.series]
    return {"runs": found.runs, "series": series, "spec": found.spec}
