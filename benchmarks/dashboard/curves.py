"""Losses of one model on several meshes, step by step: figures step_001, step_002, … of a counted case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.dashboard import charts
from benchmarks.dashboard.panels import Figure
from benchmarks.dashboard.tables import Cell, Row, Table
from benchmarks.figures import ordered
from benchmarks.record import Case, printable

ALONE = "one process"  # as the way is called that other meshes are told from


def steps(case: Case) -> dict[int, float]:
    """Losses by step."""
    return case.curves.get("step", {})


def figures(cases: Sequence[Case]) -> list[Figure]:
    """Of each model: the loss on one mesh, then for each other mesh how far its loss lies from that."""
    made = []
    for name, of_name in itertools.groupby([case for case in cases if steps(case)], key=lambda case: case.name):
        ways, title = {case.way: steps(case) for case in of_name}, printable(name)
        first, _ = _distances(ways)
        data = [
            {"name": printable(first), "x": step, "value": loss, "tip": printable(f"{first}, step {step}: {loss:.6g}")}
            for step, loss in ways[first].items()
        ]
        beside = "; below, how far each other mesh lies from it" if len(ways) > 1 else ""
        made.append(
            Figure(
                title=title,
                note=f"loss by step, {printable(first)}{beside}",
                told=f"Loss by step, {title}: {printable(first)} from {_ends(ways[first])}.",
                spec=charts.curve(data),
                wide=True,
            )
        )
        made += _apart_from_one(title, ways)
    return made


def _apart_from_one(title: str, ways: Mapping[str, Mapping[int, float]]) -> Iterator[Figure]:
    """Of each mesh but one: how far its loss lies from that of the one, all on one scale."""
    first, others = _distances(ways)
    ends = [0.0, *(each for by_step in others.values() for each in by_step.values())]
    for way, by_step in others.items():
        most = max(by_step.values(), key=abs, default=0.0)
        data = [
            {"name": printable(way), "x": step, "value": each, "tip": printable(f"{way}, step {step}: {each:.3e}")}
            for step, each in by_step.items()
        ]
        yield Figure(
            title=printable(way),
            note=f"relative difference to {printable(first)}; one scale for all",
            told=f"{title}: the loss of {printable(way)} beside that of {printable(first)}, at most {most:.1e} apart.",
            spec=charts.apart(data, min(ends), max(ends) or 1e-9),
        )


def distances(cases: Sequence[Case]) -> list[Table]:
    """The numbers of these charts: a row for each step, a column for each mesh."""
    made = []
    for name, of_name in itertools.groupby([case for case in cases if steps(case)], key=lambda case: case.name):
        first, others = _distances({case.way: steps(case) for case in of_name})
        if others:
            rows = [
                Row((str(step),), tuple(Cell(f"{each[step]:.3e}" if step in each else "") for each in others.values()))
                for step in sorted(set().union(*others.values()))
            ]
            caption = f"{printable(name)}: the loss minus that of {printable(first)}, relative to it"
            head = ("step", *map(printable, others))
            made.append(Table(name=f"apart {printable(name)}", caption=caption, head=head, rows=tuple(rows)))
    return made


def _distances(ways: Mapping[str, Mapping[int, float]]) -> tuple[str, dict[str, dict[int, float]]]:
    """One process, or else the first way, and by step what is between it and each other, relative to its loss."""
    some = ordered(ways)
    first = next((way for way in some if ALONE in way), some[0])
    own = ways[first]
    return first, {
        way: {step: loss / own[step] - 1 for step, loss in ways[way].items() if own.get(step)}
        for way in some
        if way != first
    }


def differences(cases: Sequence[Case]) -> tuple[str, ...]:
    """Of each model: how far its losses lie apart on any two meshes, relative to the larger, at the step where it is most."""
    told = []
    for name, of_name in itertools.groupby([case for case in cases if steps(case)], key=lambda case: case.name):
        ways = {case.way: steps(case) for case in of_name}
        if len(ways) < 2:
            told.append(printable(f"{name}: one mesh, with which none can be compared"))
            continue
        common = sorted(set.intersection(*(set(each) for each in ways.values())))
        apart = {step: _apart([each[step] for each in ways.values()]) for step in common}
        if apart:
            worst = max(apart, key=lambda step: apart[step])
            told.append(
                printable(
                    f"{name}: the largest relative difference between {len(ways)} meshes is {apart[worst]:.1e}, at step "
                    f"{worst} of {len(common)}"
                )
            )
    return tuple(told)


def _ends(losses: Mapping[int, float]) -> str:
    first, *_, last = [*losses.values()] * 2
    return f"{first:.4f} to {last:.4f}"


def _apart(losses: Sequence[float]) -> float:
    largest = max(abs(loss) for loss in losses)
    return (max(losses) - min(losses)) / largest if largest else 0.0
