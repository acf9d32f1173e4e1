"""Tables as values: every number of the page stands in one of them, with its ratio to Weft's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import TIMES, every_figure, ordered, quantity, ratios
from benchmarks.record import Case, printable

FIGURES = {
    "roofline": "share of the roofline",
    "peak_bytes": "memory held",
    "gradient_bytes": "memory of the gradients",
    "bytes_a_logit": "bytes a logit",
    "gathered_bytes_a_token": "bytes gathered a token",
    "flop": "flop",
    "bytes_over_bound_mean": "bytes over the bound, mean",
    "bytes_over_bound_max": "bytes over the bound, most",
    "share_above_bound": "share of pairs above the bound",
    "unneeded": "pairs that need nothing, yet receive",
    "time of the host": "host time",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """text: what is shown.  detail: smaller, under it.  missing: why there is no number, in words."""

    text: str = ""
    detail: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    heads: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """name: what `data-table` says, for whoever reads the page by program."""

    name: str
    caption: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]


def named(label: str) -> str:
    """A figure's name in words."""
    return FIGURES.get(label, printable(label).replace("_", " "))


def ways_side_by_side(group: str, title: str, cases: Sequence[Case]) -> Table:
    """A row for each figure of each case; "2.00×" is twice Weft's."""
    ways = ordered(case.way for case in cases)
    over = {(case.key, label): ratio for case, label, ratio in ratios(cases, every_figure)}
    rows = []
    for name, of_name in itertools.groupby(cases, key=lambda case: case.name):
        by_way = {case.way: case for case in of_name}
        labels = dict.fromkeys(label for case in by_way.values() for label in every_figure(case)) or {"": None}
        for label in labels:
            cells = [_cell(by_way.get(way), label, over) for way in ways]
            rows.append(Row((printable(name), named(label)), tuple(cells)))
    return Table(
        name=f"group {group}",
        caption=f"{title}; × is over Weft's",
        head=("case", "figure", *map(printable, ways)),
        rows=tuple(rows),
    )


def _cell(case: Case | None, label: str, over: dict[tuple[tuple[str, str, str], str], float]) -> Cell:
    if case is None:
        return Cell()
    if case.status != "measured":
        return Cell(in_words(case), missing=True)
    figures = every_figure(case)
    if label not in figures:
        return Cell()
    ratio = over.get((case.key, label))
    spread = spread_of(case) if label in TIMES.values() else ""
    return Cell(
        quantity(label, figures[label]), ", ".join(([times(ratio)] if ratio else []) + ([spread] if spread else []))
    )


def spread_of(case: Case) -> str:
    """From 1 ms to 1.1 ms, where the percentiles are told."""
    low, _, high = (case.seconds.p20, case.seconds.median, case.seconds.p80)
    return f"{quantity('time', low)} to {quantity('time', high)}" if low < high else ""


def times(ratio: float) -> str:
    return f"{ratio:.2f}×" if 0.01 <= ratio < 1000 else f"{ratio:.3g}×"


def in_words(case: Case) -> str:
    """Why there is no figure."""
    if case.status == "absent":
        return "absent: not installed, or not of this device"
    return case.outcome
