"""`weft layout`: draw which rank holds which part of a tensor, and plan a change of layout. Starts no process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from weft.mesh import Layout, ProcessMesh
from weft.mesh.extension import WIDTH, coloured

from ..terminal import PROGRAM
from .arguments import parse, report_bad_input

MOST_RANKS_OF_PICTURE = 2**20  # to draw; takes 0.1 s
MOST_RANKS_OF_PLAN = 1024  # to plan for; takes 10 s, for the bytes of every rank
ABOUT = f"""\
  Draws which rank holds which part of a tensor. With TARGET, also plans the change to that layout: the steps, the \
layout before and after each, and the bytes received. No process is started.

Examples
  {PROGRAM} layout "dp: S(0), tp: S(1)" \\
    --mesh dp=2,tp=4
  {PROGRAM} layout "tp: S(0)" \\
    --mesh tp=4 --shape 257,128
  {PROGRAM} layout "tp: P" "tp: S(0)" \\
    --mesh tp=4 --shape 8,6

A layout
  says what each axis of the mesh does to the tensor: S(0) splits dim 0, R replicates, P leaves each rank a partial \
sum, P(max) a partial maximum. Axes that are not named replicate. If several axes split the same dim, the first one \
written splits first.

A picture
  has rows for the first dim that is split and columns for the second. Each cell names the ranks that hold it. Rank 0 \
is the first process, and the last axis of the mesh varies fastest. 0+1 are ranks with a partial value each.

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Draw which rank holds which part of a tensor."""

    layout: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")]
    """The layout, as "dp: S(0), tp: R"; "" replicates over all axes."""
    target: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TARGET]", help_behavior_hint="(default: no change)")
    ] = None
    """The layout to change to."""
    mesh: Annotated[str, tyro.conf.arg(metavar="SIZES", help_behavior_hint="(required)")] = ""
    """The axes of the mesh and their sizes, as dp=2,tp=4."""
    shape: Annotated[
        str | None, tyro.conf.arg(metavar="SIZES", help_behavior_hint="(default: unknown; TARGET needs it)")
    ] = None
    """The shape of the whole tensor, as 8,6."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """The tensor's dtype, to count the bytes of a change."""


def run(arguments: list[str]) -> int:
    options = parse(LayoutOptions, arguments, command="layout", about=ABOUT)
    console = Console(highlight=False, soft_wrap=True)
    with report_bad_input("layout"):
        text = _explain(options, console.width)
    console.print(coloured(text))
    return 0


def _explain(options: LayoutOptions, columns: int) -> str:
    """The picture of the layout, or with a target the plan of the change. columns: width of the terminal.

    Raises ValueError for an invalid mesh, shape or layout, and for a mesh too large.
    """
    mesh = _mesh(options.mesh)
    shape = None if options.shape is None else _shape(options.shape)
    _check_size(mesh, MOST_RANKS_OF_PICTURE, "drawn")
    layout = Layout(mesh, options.layout)
    if options.target is None:
        return layout.explain(shape, width=min(columns, WIDTH))
    target = Layout(mesh, options.target)
    if shape is None:
        raise ValueError("planning a change of layout needs the shape of the whole tensor; give it, as --shape 8,6")
    _check_size(mesh, MOST_RANKS_OF_PLAN, "planned for")
    import torch
    from weft.reshard import plan

    return plan(layout, target, shape, getattr(torch, options.dtype)).explain(width=columns)


def _mesh(text: str) -> ProcessMesh:
    """The mesh written as "dp=2,tp=4". Raises ValueError for another form."""
    if not text.strip():
        raise ValueError("the mesh is missing; give its axes and their sizes, as --mesh dp=2,tp=4")
    sizes: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", item, re.ASCII)
        if match is None:
            raise ValueError(f"{item!r} in --mesh {text!r} is not 'axis=size'; write it like --mesh dp=2,tp=4")
        if match[1] in sizes:
            raise ValueError(f"axis {match[1]!r} is given twice in --mesh {text!r}; each axis needs its own name")
        sizes[match[1]] = int(match[2])
    return ProcessMesh.grid(**sizes)


def _check_size(mesh: ProcessMesh, most: int, what: str) -> None:
    """Raise ValueError for a mesh of more ranks than `most`. what: the action, for the error, as "drawn"."""
    if mesh.size > most:
        raise ValueError(f"the mesh has {mesh.size:,} ranks, but at most {most:,} can be {what}; give a smaller --mesh")


def _shape(text: str) -> tuple[int, ...]:
    """The shape written as "8,6". Raises ValueError for another form."""
    sizes = text.split(",") if text.strip() else []
    if not all(re.fullmatch(r"\s*\d+\s*", size, re.ASCII) for size in sizes):
        raise ValueError(f"--shape {text!r} is not a list of sizes; write it like --shape 8,6")
    return tuple(map(int, sizes))
