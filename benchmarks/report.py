"""A run in Markdown, for the summary of a CI job: `python -m benchmarks.report FILE [--against FILE]`.

FILE is a run of the history, or a file of pytest-benchmark. Each baseline's figure has its ratio to Weft's figure:
1.30 beside a time means 1.30 times as long as Weft.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import history
from benchmarks.compare import changes, sentence
from benchmarks.figures import TIMES, by_baseline, figures, ordered, other_timer, quantity, ratios
from benchmarks.record import STATUSES, Case, HistoryError, Run, printable


def report(run: Run, against: Run | None = None) -> str:
    """The whole page. Raises HistoryError where `against` is of another device."""
    groups = {group: list(cases) for group, cases in itertools.groupby(run.cases, key=lambda case: case.group)}
    statuses = Counter(case.status for case in run.cases)
    counted = ", ".join(f"{statuses[status]} {status}" for status in STATUSES)
    of = f"{escaped(run.device)}, commit {escaped(run.commit[:10])}{' with changes' if run.dirty else ''}, {run.time}"
    made_with = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    where = f"On {run.where}, with {made_with}." if made_with else f"On {run.where}."
    lines = [f"# Benchmarks on {of}", "", f"Of {len(run.cases)} cases {counted}. {escaped(where)}"]
    means = [f"- in {escaped(group)}: {told}" for group, cases in groups.items() if (told := _means(cases))]
    if means:
        lines += ["", "Over Weft's, in the geometric mean of a group:", "", *means]
    for group, cases in groups.items():
        lines += ["", f"## {escaped(group)}", "", *_ways_side_by_side(cases)]
    if against:
        lines += ["", *_changed(run, against)]
    return "\n".join(lines) + "\n"


def escaped(raw: str) -> str:
    """Such that Markdown shows `raw` as it is, in a cell of a table too."""
    marks = re.sub(r"[\\`*_\[\]#|~$]", r"\\\g<0>", printable(raw))
    return marks.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _means(cases: Sequence[Case]) -> str:
    """Of each baseline: the geometric means of its ratios to Weft."""
    return "; ".join(
        f"{escaped(way)} "
        + ", ".join(f"{statistics.geometric_mean(each):.2f} {escaped(label)}" for label, each in by_label.items())
        for way, by_label in by_baseline(cases).items()
    )


def _ways_side_by_side(cases: Sequence[Case]) -> list[str]:
    """A row for each figure of each name."""
    ways = ordered(case.way for case in cases)
    over = {(case.key, label): ratio for case, label, ratio in ratios(cases)}
    rows = []
    for name, of_name in itertools.groupby(cases, key=lambda case: case.name):
        by_way = {case.way: case for case in of_name}
        labels = dict.fromkeys(label for way in ways if way in by_way for label in figures(by_way[way])) or {"": None}
        for label in labels:
            cells = [_cell(by_way.get(way), by_way.get("Weft"), label, over) for way in ways]
            rows.append([escaped(name), escaped(label), *cells])
    return _table(["case", "figure", *map(escaped, ways)], rows)


def _cell(case: Case | None, weft: Case | None, label: str, over: dict[tuple[tuple[str, str, str], str], float]) -> str:
    if case is None:
        return ""
    if case.status != "measured":
        return escaped(case.outcome)
    shown = figures(case)
    if label not in shown:
        return ""
    ratio = over.get((case.key, label), math.nan)
    timer = escaped(other_timer(case, weft, label))
    return quantity(label, shown[label]) + timer + ("" if math.isnan(ratio) else f" ({ratio:.2f})")


def _changed(run: Run, against: Run) -> list[str]:
    """Times that changed beside their baselines, counted numbers, cases that came, went or changed their status."""
    rows = []
    compared = changes(run, [against])
    for change in (each for each in compared if each.slower or each.faster):
        before, now = (f"{ratio.median:.2f}×" for ratio in (change.before, change.now))
        moved = f"{change.ratio:.2f} ({change.noise[0]:.2f} to {change.noise[1]:.2f})"
        label = f"{TIMES[change.case.kind]}: {escaped(change.baseline or '')} over it"
        rows.append([*_named(change.case), label, before, now, moved])
    old, new = ({case.key: case for case in each.cases} for each in (against, run))
    for key in sorted(old.keys() | new.keys()):
        statuses = [cases[key].status if key in cases else "not there" for cases in (old, new)]
        if statuses[0] != statuses[1]:
            rows.append([*_named(new.get(key) or old[key]), "status", *statuses, ""])
            continue
        was, becomes = figures(old[key]), figures(new[key])
        for label in sorted((was.keys() | becomes.keys()) - {*TIMES.values(), "roofline"}):
            if was.get(label) != becomes.get(label):
                told = [quantity(label, each[label]) if label in each else "" for each in (was, becomes)]
                quotient = f"{was[label] / becomes[label]:.2f}" if label in was and becomes.get(label) else ""
                rows.append([*_named(new[key]), escaped(label), *told, quotient])
    head = f"## Changed since commit {escaped(against.commit[:10])}, {against.time}"
    verdict = sentence(compared)
    lines = [head, "", f"{verdict[0].upper()}{verdict[1:]}.{'' if rows else ' Of all else nothing changed.'}"]
    table = _table(["group", "case", "way", "figure", "before", "now", "below 1 is worse (spread)"], sorted(rows))
    return [*lines, *(["", *table] if rows else [])]


def _named(case: Case) -> list[str]:
    return [escaped(case.group), escaped(case.name), escaped(case.way)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="A run in Markdown.")
    parser.add_argument("file", type=Path, help="a run of benchmarks/results, or what --benchmark-json wrote")
    parser.add_argument("--against", type=Path, metavar="FILE", help="a run before it: what has changed since")
    options = parser.parse_args(arguments)
    try:
        against = history.load(options.against) if options.against else None
        print(report(history.load(options.file), against), end="")
    except HistoryError as error:
        sys.exit(f"benchmarks.report: {error}")


if __name__ == "__main__":
    main()
