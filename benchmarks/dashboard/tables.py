"""Tables as values: every number of the page stands in one of them, with its ratio to Weft's."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.figures import TIMES, by_baseline, every_figure, figures, place, quantity, ratios
from benchmarks.record import Case, printable

FIGURES = {
    "roofline": "share of the roofline",
    "peak_bytes": "memory above inputs and gradients",
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
TIMERS = {"events": "CUDA events", "graph": "CUDA graph, replayed", "host": "the host's clock"}


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


def ways(cases: Iterable[Case]) -> list[str]:
    """Each once: Weft, its forms, the baselines; among the forms of one baseline that with less before that with more."""
    least: dict[str, float] = {}
    for case in cases:
        least.setdefault(case.way, 0 if case.ours else next(iter(figures(case).values()), math.inf))

    def order(way: str) -> tuple[bool, bool, str, bool, float, str]:
        package, comma, _ = way.partition(",")
        return *place(way)[:2], package, bool(comma), least[way], way

    return sorted(least, key=order)


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
            cells = [_cell(by_way.get(way), label, over, by_way.get("Weft")) for way in columns]
            rows.append(Row((printable(name), named(label)), tuple(cells)))
    rows += _means(cases, columns)
    return Table(
        name=f"group {group}",
        caption=f"{title}; × is over Weft's",
        head=("case", "figure", *map(printable, columns)),
        rows=tuple(rows),
    )


def means(cases: Sequence[Case]) -> dict[str, float]:
    """Of each baseline: the geometric mean of its times over Weft's."""
    label = TIMES[cases[0].kind]
    return {way: statistics.geometric_mean(each[label]) for way, each in by_baseline(cases).items() if label in each}


def _means(cases: Sequence[Case], columns: Sequence[str]) -> Iterator[Row]:
    """A row, where several times of the host are compared: kernels of several kinds have no mean."""
    names = {case.name for case in cases if case.timed and case.way == "Weft"}
    if cases[0].kind == "host_time" and len(names) > 1 and (found := means(cases)):
        cells = (Cell(times(found[way]) if way in found else "") for way in columns)
        yield Row((f"geometric mean of {len(names)} cases", "host time over Weft's"), tuple(cells))


def _words(case: Case) -> dict[str, str]:
    """Figures that are words, as a timer; that a host's time is by the host's clock need not be said."""
    if case.status != "measured":
        return {}
    words = {key: value for key, value in sorted(case.figures.items()) if isinstance(value, str) and key != "device"}
    return {key: value for key, value in words.items() if (key, case.kind) != ("timer", "host_time")}


def _cell(
    case: Case | None, label: str, over: dict[tuple[tuple[str, str, str], str], float], weft: Case | None
) -> Cell:
    if case is None:
        return Cell()
    if case.status != "measured":
        return Cell(in_words(case), missing=True)
    if label in _words(case):
        word = _words(case)[label]
        return Cell(printable(TIMERS.get(word, word) if label == "timer" else word))
    found = every_figure(case)
    if label not in found:
        return Cell()
    ratio = over.get((case.key, label))
    told = [times(ratio)] if ratio else []
    if label in TIMES.values():
        if ratio and weft:
            told.append(" to ".join(map(times, noise(case, weft))))
        told += filter(None, [spread_of(case)])
    return Cell(quantity(label, found[label]), ", ".join(told))


def noise(case: Case, weft: Case) -> tuple[float, float]:
    """Of the ratio of its time to Weft's: from the one's 20th percentile over the other's 80th to the reverse."""
    return case.seconds.p20 / weft.seconds.p80, case.seconds.p80 / weft.seconds.p20


def spread_of(case: Case) -> str:
    """From 1 ms to 1.1 ms, where the percentiles are told."""
    low, _, high = (case.seconds.p20, case.seconds.median, case.seconds.p80)
    return f"{quantity('time', low)} to {quantity('time', high)}" if low < high else ""


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}×" if 0.01 <= ratio < 1000 else f"{ratio:.3g}×"


def in_words(case: Case) -> str:
    """Why there is no figure."""
    if case.status == "absent":
        return "absent: not installed, or not of this device"
    return case.outcome
