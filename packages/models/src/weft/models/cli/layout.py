"""`weft layout`: who holds what, and how it is brought elsewhere; no process is started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from weft.mesh import Layout, ProcessMesh
from weft.mesh.picture import WIDTH, coloured

from ..terminal import PROGRAM
from .arguments import parse, refusing

DRAWN = 2**20  # ranks at most: 0.1 s
PLANNED = 1024  # ranks at most: every one is asked what it receives, for 10 s
ABOUT = f"""\
  Draws who holds what of a tensor. With TARGET, how it gets there, too: the steps, who holds what before and after each, the bytes received. No process is started.

Examples
  {PROGRAM} layout "dp: S(0), tp: S(1)" \\
    --mesh dp=2,tp=4
  {PROGRAM} layout "tp: S(0)" \\
    --mesh tp=4 --shape 257,128
  {PROGRAM} layout "tp: P" "tp: S(0)" \\
    --mesh tp=4 --shape 8,6

A layout
  says what each axis of the mesh does to the tensor: S(0) cuts dim 0 along it, R replicates, P leaves each rank an addend of the sum, P(max) of the maximum. An axis that is not named replicates. Of axes that cut one dim, the first one written cuts first.

A picture
  has rows for the first dim that is cut and columns for the second. In a cell stand the ranks that hold it: 0 is the first process, and the last axis of the mesh varies fastest. 0+1 are ranks that hold an addend each.

Exit status
  0: done; 2: input that cannot be used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Draw who holds what."""

    layout: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")]
    """As "dp: S(0), tp: R"; "" replicates."""
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
    """Of an element, for the bytes of a change."""


def run(arguments: list[str]) -> int:
    options = parse(LayoutOptions, arguments, command="layout", about=ABOUT)
    console = Console(highlight=False, soft_wrap=True)
    with refusing("layout"):
        text = _told(options, console.width)
    console.print(coloured(text))
    return 0


def _told(options: LayoutOptions, columns: int) -> str:
    mesh = _mesh(options.mesh)
    shape = None if options.shape is None else _shape(options.shape)
    _check_size(mesh, DRAWN, "drawn")
    layout = Layout(mesh, options.layout)
    if options.target is None:
        return layout.explain(shape, width=min(columns, WIDTH))
    target = Layout(mesh, options.target)
    if shape is None:
        raise ValueError("a change of layout is planned for a shape; give that of the whole tensor, as --shape 8,6")
    _check_size(mesh, PLANNED, "asked what they receive")
    import torch
    from weft.reshard import plan

    return plan(layout, target, shape, getattr(torch, options.dtype)).explain(width=columns)


def _mesh(text: str) -> ProcessMesh:
    """The mesh written as "dp=2,tp=4"."""
    if not text.strip():
        raise ValueError("the mesh is missing; give its axes and their sizes, as --mesh dp=2,tp=4")
    sizes: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", item, re.ASCII)
        if match is None:
            raise ValueError(f"{item!r} in --mesh {text!r} is not 'axis=size'; write it like --mesh dp=2,tp=4")
        if match[1] in sizes:
            raise ValueError(f"axis {match[1]!r} stands twice in --mesh {text!r}; each axis needs its own name")
        sizes[match[1]] = int(match[2])
    return ProcessMesh.grid(**sizes)


def _check_size(mesh: ProcessMesh, most: int, what: str) -> None:
    if mesh.size > most:
        raise ValueError(f"the mesh has {mesh.size:,} ranks, and at most {most:,} are {what}; give a smaller --mesh")


def _shape(text: str) -> tuple[int, ...]:
    """The shape written as "8,6"."""
    sizes = text.split(",") if text.strip() else []
    if not all(re.fullmatch(r"\s*\d+\s*", size, re.ASCII) for size in sizes):
        raise ValueError(f"--shape {text!r} is not a list of sizes; write it like --shape 8,6")
    return tuple(map(int, sizes))
