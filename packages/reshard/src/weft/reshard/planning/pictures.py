"""The steps of a plan as text and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest

from weft.mesh import Layout
from weft.mesh.picture import WIDTH as PICTURE_WIDTH
from weft.mesh.picture import draw

from .costs import received_elements
from .steps import Step, Targeted, follow

WIDTH = 105  # default columns of an explanation: room for two pictures of 48 columns side by side
INDENT = "   "  # before each line of a picture


def pictured(
    steps: Sequence[Step], layouts: Sequence[Layout], shape: tuple[int, ...], itemsize: int, width: int
) -> list[str]:
    """For each step, a line with the most bytes received by any rank, and pictures of the layouts around the step.

    layouts: the layout before each step. width: the columns that the pictures should fit in.
    """
    lines = []
    for number, (step, layout) in enumerate(zip(steps, layouts, strict=True), start=1):
        after = follow(step, layout)
        ranks = {*layout.mesh.ranks, *after.mesh.ranks}
        most = itemsize * max(received_elements(step, layout, shape, rank) for rank in ranks)
        lines += ["", f"{number}. {written(step, layout)}: {most:,} bytes"]
        lines += [f"{INDENT}{line}".rstrip() for line in _beside(layout, after, shape, width - len(INDENT))]
    return lines


def written(step: Step, layout: Layout) -> str:
    """The step as code on a single line, without arguments at their defaults.

    A target is written as its placements, and its mesh where the step changes the mesh.
    """
    if isinstance(step, Targeted):
        there = "" if step.target.mesh == layout.mesh else f" on {step.target.mesh}"
        return f"{type(step).__name__}({step.target}{there})"
    values = [(f.name, getattr(step, f.name)) for f in fields(step) if getattr(step, f.name) != f.default]
    return f"{type(step).__name__}({', '.join(repr(v) if n == 'axis' else f'{n}={v!r}' for n, v in values)})"


def _beside(before: Layout, after: Layout, shape: tuple[int, ...], width: int) -> list[str]:
    """The pictures of two layouts side by side; where `width` is too small, the second below the first."""
    left, right = (draw(layout, shape, width=min(width, PICTURE_WIDTH)) for layout in (before, after))
    room, middle = max(map(len, left)), min(len(left), len(right)) // 2
    if room + len("  ->  ") + max(map(len, right)) > width:
        return [*left, "->", *right]
    arrows = ["->" if row == middle else "  " for row in range(max(len(left), len(right)))]
    return [f"{a or '':{room}}  {arrow}  {b or ''}" for a, arrow, b in zip_longest(left, arrows, right, fillvalue="")]
