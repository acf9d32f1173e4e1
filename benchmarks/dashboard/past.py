"""A device's history: its runs and their machines, and each case's figures over the runs, all ways beside one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import Change, counted, timed_alike
from benchmarks.dashboard import charts
from benchmarks.dashboard.blocks import title_of
from benchmarks.dashboard.charts import Spec
from benchmarks.dashboard.headline import is_rival
from benchmarks.dashboard.sources import Device
from benchmarks.dashboard.tables import Cell, Row, Table, named, spread_of, times
from benchmarks.figures import TIMES, ordered, place, quantity
from benchmarks.record import Case, Run, printable

KINDS = {"time": "time", "host_time": "host time"}
Key = tuple[str, str, str]  # group, name and label of a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A figure of one case over the runs. points: way (its place among the group's), run, p20, median, p80."""

    key: Key
    title: str
    figure: str
    told: str
    points: tuple[tuple[int, int, float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cases that are measured alike, each a small chart; ways: of all of them, for the legend."""

    title: str
    ways: tuple[str, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """told: in words.  spec: a chart without its data, which are those of each series."""

    told: str
    runs: tuple[str, ...] = ()
    machines: tuple[int, ...] = ()  # of each run
    groups: tuple[Group, ...] = ()
    spec: Spec | None = None
    table_of_runs: Table | None = None
    tables: tuple[Table, ...] = ()

    def places(self) -> dict[Key, int]:
        """Where each series stands among those of all groups."""
        every = itertools.chain.from_iterable(group.series for group in self.groups)
        return {series.key: at for at, series in enumerate(every)}


def past(device: Device) -> Past:
    runs = list(device.runs.values())
    table_of_runs = _runs(runs)
    if len(runs) == 1:
        return Past(told="One run so far: a history starts with the second.", table_of_runs=table_of_runs)
    names = tuple(f"{run.time[:10]} {printable(run.commit[:7])}" for run in runs)
    groups = tuple(_groups(device))
    told = (
        f"{len(runs)} runs. A chart is a case, a line one way to compute it: the median of each run, from its 20th to its 80th "
        "percentile a band. The scale is logarithmic. A line joins runs of one machine; marks of another than the newest's are pale."
    )
    if not groups:
        return Past(
            told=f"{len(runs)} runs, and no figure of any that can be drawn.", runs=names, table_of_runs=table_of_runs
        )
    tables = (_over_the_runs(device, names), *_beside_those_before(device))
    return Past(
        told=told,
        runs=names,
        machines=_machines(runs),
        groups=groups,
        spec=charts.over_runs(),
        table_of_runs=table_of_runs,
        tables=tables,
    )


def _machines(runs: Sequence[Run]) -> tuple[int, ...]:
    """Of each run the number of its machine; where it was not recorded, one of its own."""
    found: dict[Any, int] = {}
    return tuple(found.setdefault(run.clock("host_time") or at, len(found)) for at, run in enumerate(runs))


def _runs(runs: Sequence[Run]) -> Table:
    """On which machine each run was made, and with which versions."""
    versions = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows = []
    for number, run in enumerate(runs, 1):
        statuses = [case.status for case in run.cases]
        told = f"{run.time[:10]} {run.time[11:16]}"
        commit = (printable(run.commit[:10]) or "unversioned") + (" with changes" if run.dirty else "")
        cells = [Cell(told), Cell(commit), *_machine(run)]
        cells += [Cell(printable(run.versions.get(name, ""))) for name in versions]
        rows.append(
            Row((str(number),), (*cells, Cell(str(statuses.count("measured"))), Cell(str(statuses.count("failed")))))
        )
    head = ("run", "UTC", "commit", "machine", "cores", "load", *map(printable, versions), "measured", "failed")
    return Table(name="runs", caption="The runs, newest first, and their machines", head=head, rows=tuple(rows[::-1]))


def _machine(run: Run) -> list[Cell]:
    if run.clock("host_time") is None:
        return [Cell("not recorded", missing=True), Cell(), Cell()]
    return [Cell(printable(str(run.machine.get(name, "")))) for name in ("cpu", "cores", "load")]


def _groups(device: Device) -> Iterator[Group]:
    """Of each case that the newest run times by Weft, kernels first; then of each counted figure that has changed."""
    keys = sorted(_timed_keys(device), key=lambda key: (key[2] != TIMES["time"], key))
    keys += sorted(_changed_keys(device), key=lambda key: (key[0] == "compiled", key))
    timed = {case.group: case.kind for case in device.newest.cases if case.timed}
    for title, some in itertools.groupby(keys, key=lambda key: _title(key, timed)):
        of_group = list(some)
        ways = ordered(
            case.way
            for case in device.newest.cases
            for key in of_group
            if key[:2] == case.key[:2] and _number(case, key[2]) is not None and is_rival(case, device.newest.cases)
        )
        yield Group(
            title=title,
            ways=tuple(map(printable, ways)),
            series=tuple(_series(device, key, ways) for key in of_group),
        )


def _title(key: Key, timed: Mapping[str, str]) -> str:
    """timed: the groups of timed cases, and their kinds."""
    group, kind = key[0], _kind(key)
    if kind == "count" and group in timed:
        return f"{title_of(group, timed[group])}, counted"
    return title_of(group, kind)


def _timed_keys(device: Device) -> set[Key]:
    return {(case.group, case.name, TIMES[case.kind]) for case in device.newest.cases if case.timed and case.ours}


def _changed_keys(device: Device) -> set[Key]:
    """Of counted figures of Weft's: those that are not the same in all runs."""
    seen: dict[tuple[str, str, str, str], set[float]] = {}
    for run in device.runs.values():
        for case in run.cases:
            if case.ours:
                for label, value in counted(case).items():
                    seen.setdefault((*case.key, label), set()).add(value)
    now = {case.key for case in device.newest.cases if case.status == "measured"}
    return {
        (group, name, label)
        for (group, name, way, label), values in seen.items()
        if len(values) > 1 and (group, name, way) in now
    }


def _kind(key: Key) -> str:
    return next((kind for kind, label in TIMES.items() if label == key[2]), "count")


def _number(case: Case, label: str) -> tuple[float, float, float] | None:
    """p20, median and p80 of a figure; of a count the number itself."""
    if case.status != "measured":
        return None
    if TIMES.get(case.kind) == label:
        each = case.seconds
        return each.p20, each.median, each.p80
    value = counted(case).get(label)
    return None if value is None else (value, value, value)


def _series(device: Device, key: Key, ways: list[str]) -> Series:
    group, name, label = key
    points, last = [], []
    for at, run in enumerate(device.runs.values()):
        for case in (case for case in run.cases if case.key[:2] == (group, name) and case.way in ways):
            if (number := _number(case, label)) is not None:
                points.append((ways.index(case.way), at, *number))
                if run is device.newest:
                    last.append(f"{printable(case.way)} {quantity(_unit(label), number[1])}")
    figure = "" if label in TIMES.values() else named(label)
    told = f"{printable(name)}, {figure or named(label)} over the runs; in the newest {'; '.join(last) or 'none'}."
    return Series(key=key, title=printable(name), figure=figure, told=told, points=tuple(points))


def _unit(label: str) -> str:
    return "time" if label in TIMES.values() else label


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
    earlier = list(device.runs.values())[:-1]
    most = max(len(timed_alike(device.newest, earlier, kind)) for kind in KINDS)
    yield Table(
        name="changes",
        caption=f"The newest run beside the median of {most} before it; above 1 is faster now",
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


def as_data(found: Past) -> Mapping[str, Any]:
    """What the page's script draws from."""
    series = [
        {"ways": group.ways, "points": each.points, "kind": _kind(each.key)}
        for group in found.groups
        for each in group.series
    ]
    return {"runs": found.runs, "machines": found.machines, "series": series, "spec": found.spec}
