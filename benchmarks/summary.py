"""What a run of the benchmarks found, as it ends: Weft's figures, and beside each the others' over it."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import figures, other_timer, quantity, ratios
from benchmarks.record import Case, printable

NAME = 52  # columns of it


def lines(cases: Sequence[Case], width: int | None = None) -> Iterator[str]:
    """A heading for each group, then its lines. width: of the terminal, without one."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    for group, members in itertools.groupby(sorted(cases, key=lambda case: case.group), key=lambda case: case.group):
        of_group = list(members)
        yield f"{printable(group)}: Weft's figures, and the others' over them"
        for name in dict.fromkeys(case.name for case in of_group):
            yield from _of_a_name([case for case in of_group if case.name == name], width)


def of_device(name: str, ceilings: Mapping[str, float]) -> str:
    """What it can do at the most, as it was measured."""
    told = ", ".join(f"{label.replace('_', ' ')} {quantity(label, value)}" for label, value in ceilings.items())
    return f"{printable(name)}, at the most: {told or 'not measured'}"


def _of_a_name(cases: Sequence[Case], width: int) -> Iterator[str]:
    beside: dict[str, list[str]] = {}
    weft = next((case for case in cases if case.way == "Weft"), None)
    for case, label, ratio in ratios(cases):
        beside.setdefault(label, []).append(f"{printable(case.way)} {ratio:.2f}{other_timer(case, weft, label)}")
    ours = [case for case in cases if case.way == "Weft"] or list(cases)
    for case in ours:
        shown = {label: f"{printable(label)} {quantity(label, value)}" for label, value in figures(case).items()}
        compared = [f"{told}; {', '.join(beside[label])}" for label, told in shown.items() if label in beside]
        alone = [told for label, told in shown.items() if label not in beside]
        title = printable(case.name if case.way == "Weft" else f"{case.name}, {case.way.removeprefix('Weft, ')}")
        told = [*compared, ", ".join(alone) if case.status == "measured" else case.outcome]
        for line in filter(None, told):
            yield from textwrap.wrap(f"  {title:{NAME}} {line}", width, subsequent_indent=" " * (NAME + 5))
            title = ""
    if absent := [printable(case.way) for case in cases if case not in ours and case.status != "measured"]:
        yield f"  {'':{NAME}} not measured: {', '.join(absent)}"
