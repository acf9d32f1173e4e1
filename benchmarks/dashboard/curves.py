"""Losses of one model on several meshes, step by step: figures step_001, step_002, … of a counted case."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from benchmarks.dashboard import charts
from benchmarks.dashboard.panels import Figure
from benchmarks.figures import ordered
from benchmarks.record import Case, printable


def steps(case: Case) -> dict[int, float]:
    """Losses by step."""
    return case.curves.get("step", {})


def figures(cases: Sequence[Case]) -> list[Figure]:
    made = []
    for name, of_name in itertools.groupby([case for case in cases if steps(case)], key=lambda case: case.name):
        ways = {case.way: steps(case) for case in of_name}
        names = [printable(way) for way in ordered(ways)]
        data = [
            {"name": printable(way), "x": step, "value": loss, "tip": printable(f"{way}, step {step}: {loss:.6g}")}
            for way in ordered(ways)
            for step, loss in ways[way].items()
        ]
        spec = charts.curves(data, names)
        ends = "; ".join(f"{printable(way)} from {_ends(ways[way])}" for way in ordered(ways))
        title = printable(name)
        made.append(
            Figure(
                title=title,
                note="loss by step, a line for each mesh",
                told=f"Loss by step, {title}: {ends}.",
                spec=spec,
                wide=True,
            )
        )
    return made


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
