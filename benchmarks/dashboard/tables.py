"""Tables as values. Every number of the page stands in a table, with its ratio to Weft's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.compare import Change, counted
from benchmarks.figures import TIMES, every_figure, figures, place, quantity, ratios
from benchmarks.record import Case, Run, printable

FIGURES = {
    "roofline": "share of the roofline",
    "peak_bytes": "memory above inputs and gradients",
    "unneeded": "pairs that need nothing, yet receive",
    "time of the host": "host time",
}
TIMERS = {"events": "CUDA events", "graph": "CUDA graph, replayed", "host": "the host's clock"}


Key = tuple[str, str, str]  # of a case


class Cell(NamedTuple):
    """One cell. text: the figure.  detail: small, below.  missing: text says why there is no figure."""

    text: str = ""
    detail: str = ""
    missing: bool = False


class Row(NamedTuple):
    heads: Sequence[str]
    cells: Sequence[Cell]


class Table(NamedTuple):
    """A table. name: the value of its `data-table` attribute, for programs."""

    name: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Row]


def table(name: str, caption: str, head: Iterable[str], rows: Iterable[Row]) -> Table:
    return Table(printable(name), printable(caption), [*map(printable, head)], [*rows])


def row(heads: Iterable[str], cells: Iterable[Cell | str]) -> Row:
    """A row; a plain string becomes a cell."""
    return Row([*map(printable, heads)], [each if isinstance(each, Cell) else Cell(printable(each)) for each in cells])


def named(label: str) -> str:
    """A figure's name in words."""
    return FIGURES.get(label, printable(label).replace("_", " "))


def ways(cases: Iterable[Case]) -> list[str]:
    """Each way once: Weft, Weft's forms, baselines; forms of one baseline by their first figure."""
    some = reversed([*cases])  # the first of a way stays
    least = {case.way: 0 if case.ours else next(iter(figures(case).values()), math.inf) for case in some}
    return sorted(least, key=lambda way: (*place(way)[:2], way.partition(",")[0], "," in way, least[way], way))


def ways_side_by_side(group: str, title: str, cases: Sequence[Case]) -> Table:
    """A row for each figure of each case; "2.00×" is twice Weft's."""
    columns = ways(cases)
    over = {(case.key, label): ratio for case, label, ratio in ratios(cases, every_figure)}
    rows = []
    for name, of_name in itertools.groupby(cases, key=lambda case: case.name):
        by_way = {case.way: case for case in of_name}
        found = list(by_way.values())
        labels = dict.fromkeys(label for case in found for label in (*every_figure(case), *_words(case))) or {"": None}
        for label in labels:
            cells = (_cell(by_way.get(way), label, over, by_way.get("Weft")) for way in columns)
            rows.append(row((name, named(label)), cells))
    return table(f"group {group} {cases[0].kind}", title, ("case", "figure", *columns), rows)


def _words(case: Case) -> dict[str, str]:
    """A case's figures in words, as its timer; a host time's timer goes without saying."""
    if case.status != "measured":
        return {}
    words = {key: value for key, value in sorted(case.figures.items()) if isinstance(value, str) and key != "device"}
    return {key: value for key, value in words.items() if (key, case.kind) != ("timer", "host_time")}


def _cell(case: Case | None, label: str, over: Mapping[tuple[Key, str], float], weft: Case | None) -> Cell:
    if case is None:
        return Cell()
    if case.status != "measured":
        return Cell(case.outcome, missing=True)
    if word := _words(case).get(label):
        return Cell(printable(TIMERS.get(word, word) if label == "timer" else word))
    found = every_figure(case)
    if label not in found:
        return Cell()
    ratio = over.get((case.key, label))
    told = [times(ratio)] if ratio else []
    if label in TIMES.values():
        told += [" to ".join(map(times, case.seconds.over(weft.seconds).ends))] if ratio and weft else []
        told += [spread_of(case)] if spread_of(case) else []
    return Cell(quantity(label, found[label]), ", ".join(told))


def spread_of(case: Case) -> str:
    """As in "1 ms to 1.1 ms"; empty without percentiles."""
    low, high = case.seconds.ends
    return f"{quantity('time', low)} to {quantity('time', high)}" if low < high else ""


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}×" if 0.01 <= ratio < 1000 else f"{ratio:.3g}×"


def several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(label: str, value: float) -> str:
    """A figure with its unit and three digits; whole numbers without rounding."""
    told = quantity(label, value, 3)
    return told if " " in told or "%" in told or value == int(value) else f"{value:.3g}"


def of_runs(runs: Sequence[Run]) -> Table:
    """Each run's machine and versions."""
    versions = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows = []
    for number, run in enumerate(runs, 1):
        commit = (run.commit[:10] or "unversioned") + (" with changes" if run.dirty else "")
        machine = [str(run.machine.get(name, "")) for name in ("cpu", "cores", "load")]
        machine = machine if run.clock("host_time") else ["not recorded", "", ""]
        counts = [str(sum(case.status == status for case in run.cases)) for status in ("measured", "failed")]
        told = [run.versions.get(name, "") for name in versions]
        rows.append(row((str(number),), (f"{run.time[:10]} {run.time[11:16]}", commit, *machine, *told, *counts)))
    head = ("run", "UTC", "commit", "machine", "cores", "load", *versions, "measured", "failed")
    return table("runs", "The runs, newest first, and their machines", head, rows[::-1])


def over_the_runs(runs: Sequence[Run]) -> Table:
    """A column for each run: times of the newest run's cases, and counted figures with several values."""
    newest = sorted(runs[-1].cases, key=lambda case: (case.kind != "time", case.group, case.name, place(case.way)))
    by_run = [{case.key: case for case in run.cases} for run in runs]
    rows = []
    for case in newest:
        found = [cases.get(case.key) for cases in by_run]
        heads = (case.group, case.name, case.way)
        if case.timed:
            same = (each if each and each.timed and each.kind == case.kind else None for each in found)
            missing = Cell("not timed", missing=True)
            cells = [Cell(quantity("time", each.seconds.median), spread_of(each)) if each else missing for each in same]
            rows.append(row((*heads, named(TIMES[case.kind])), cells))
        for label in counted(case) if case.ours else ():
            numbers = [counted(each).get(label) if each else None for each in found]
            if len({*numbers} - {None}) > 1:
                cells = [Cell("" if each is None else quantity(label, each)) for each in numbers]
                rows.append(row((*heads, named(label)), cells))
    head = ("group", "case", "way", "figure", *(f"{run.time[:10]} {run.commit[:7]}" for run in runs))
    caption = "Every time over the runs, oldest first, with p20 to p80; counted figures that changed"
    return table("history", caption, head, rows)


def of_changes(found: Sequence[Change]) -> Table:
    rows = []
    for change in sorted(found, key=lambda each: (each.case.kind != "time", each.case.key)):
        case, judged = change.case, change.baseline is not None
        before, now = (quantity("time", each) for each in (change.seconds, case.seconds.median))
        ratios = (times(change.before.median), times(change.now.median)) if judged else ("", "")
        spread = " to ".join(map(times, change.noise)) if judged else ""
        baseline = Cell(printable(change.baseline or "none"), missing=not judged)
        cells = (before, now, baseline, *ratios, Cell(times(change.ratio) if judged else "", spread), change.word)
        rows.append(row((case.group, case.name, case.way, named(TIMES[case.kind])), cells))
    clocks = ("time before", "time now", "baseline", "its time over Weft's before", "now", "now / before", "verdict")
    caption = "Each time of Weft's beside the runs before, by its baseline; below 1 it is slower now"
    return table("changes", caption, ("group", "case", "way", "clock", *clocks), rows)


def engines(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Bytes of layout changes over the bound: by mesh, shape and engine, with every ratio."""
    made = []
    for each in rows:
        ratios = ", ".join(f"{times(float(ratio))}: {count}" for ratio, count in each["ratios"].items())
        cells = (str(each["pairs"]), times(each["mean"]), times(each["max"]), Cell(ratios, missing=True))
        made.append(row((each["mesh"], " x ".join(map(str, each["shape"])), each["engine"]), cells))
    head = ("mesh", "shape", "engine", "pairs", "mean", "most", "each ratio: pairs that have it")
    return table("engines", "Bytes over the fewest possible, by mesh, shape and engine", head, made)


CAPTIONS = {  # by the name of the value beside a prediction
    "reported": ("predictions", "Steps that others have published: predicted beside reported"),
    "measured": ("measured", "Steps of small models, run here: predicted beside measured"),
}


def predictions(rows: Sequence[Mapping[str, Any]], beside: str) -> Table:
    """Predicted figures of steps, beside the figures "reported" by others or "measured" here."""
    made = []
    for each in rows:
        unit, ratio = "time" if each["figure"] == "seconds" else "bytes", times(each["predicted"] / each[beside])
        use = ["held out" if each["held_out"] else "given", each["source"]] if "source" in each else [each["machine"]]
        values = (quantity(unit, each[key]) for key in ("predicted", beside))
        cells: list[Cell | str] = [*values, ratio, *(Cell(printable(word), missing=True) for word in use)]
        made.append(row((each["row"], each["figure"]), cells))
    of_rows = ("use", "source") if beside == "reported" else ("machine",)
    name, caption = CAPTIONS[beside]
    return table(name, caption, ("step", "figure", "predicted", beside, f"predicted / {beside}", *of_rows), made)


def compiled(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("registers", "spilt", "shared", "loads and stores by their bits")
    made, targets = [], list(dict.fromkeys(each["target"] for each in rows))
    for variant, some in itertools.groupby(rows, key=lambda each: each["variant"]):
        cells = {target: ["not compiled", "", "", ""] for target in targets}
        for each in some:
            held = (quantity("bytes", each[key]) for key in ("spill_bytes", "shared_bytes"))
            cells[each["target"]] = [str(each["registers"]), *held, ", ".join(each["accesses"])]
        made.append(row((variant,), (cell for target in targets for cell in cells[target])))
    head = ("variant", *(f"{target} {key}" for target in targets for key in columns))
    return table("compiled", "Of each variant and target: registers a thread, bytes spilt, shared memory", head, made)


def unmeasured(cases: Sequence[Case]) -> list[str]:
    """A line for each way and reason, with the names of the cases without figures."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for case in (case for case in cases if case.status != "measured"):
        by_reason.setdefault((printable(case.way), case.outcome), []).append(printable(case.name))
    return [f"{way} is {reason} ({'; '.join(names)})" for (way, reason), names in by_reason.items()]
