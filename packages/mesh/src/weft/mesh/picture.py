"""Who holds what, drawn in ASCII: the cells that a layout cuts a tensor into, and the ranks in each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING

from .placement import Partial, Replicate

if TYPE_CHECKING:
    from .layout import Layout

CELLS = 6  # drawn along a dim; of more, the first ones and the last
RANKS = 8  # listed in a cell; of more, the first two and their number

Coordinate = dict[str, int]


def draw(layout: Layout, global_shape: Sequence[int] | None = None) -> list[str]:
    """Lines of a grid: rows are dim 0 (columns, in a tensor of one dim), columns the next dim that is cut.

    A cell names the ranks that hold it; where the layout is Partial, those of each addend: `0+1`, `max(0, 1)`. With the
    shape, the indices of each cut stand beside it. Of further dims that are cut, the first part is drawn.
    """
    cut = sorted(layout.shard_order)
    flat = global_shape is not None and len(global_shape) == 1
    row = 0 if 0 in cut and not flat else None
    column = next((dim for dim in cut if dim != row), None)
    grid = [
        ["..." if top is None or left is None else _cell(layout, top | left) for top in _parts(layout, column)]
        for left in _parts(layout, row)
    ]
    if global_shape is not None:
        grid = _labelled(grid, layout, tuple(global_shape), row, column)
    lines = _boxed(grid, head=global_shape is not None)
    hidden = [dim for dim in cut if dim not in (row, column)]
    return lines + [f"the first of {layout.parts(dim)} parts of dim {dim}" for dim in hidden]


def _parts(layout: Layout, dim: int | None) -> list[Coordinate | None]:
    """The coordinates of the parts of a dim along the axes that cut it; None for those left out."""
    if dim is None:
        return [{}]
    axes = layout.shard_order[dim]
    count = layout.parts(dim)
    drawn = [*range(CELLS - 2), None, count - 1] if count > CELLS else [*range(count)]
    found: list[Coordinate | None] = []
    for index in drawn:
        if index is None:
            found.append(None)
            continue
        coordinate = {}
        for axis in reversed(axes):
            index, coordinate[axis] = divmod(index, layout.mesh.axis_size(axis))
        found.append(coordinate)
    return found


def _cell(layout: Layout, at: Coordinate) -> str:
    """The ranks at a coordinate: one for each replica, in groups for each addend."""
    mesh = layout.mesh
    added = {axis: p.op for axis, p in zip(mesh.axis_names, layout.placements, strict=True) if isinstance(p, Partial)}
    whole = [a for a, p in zip(mesh.axis_names, layout.placements, strict=True) if isinstance(p, Replicate)]
    here = dict.fromkeys(mesh.axis_names, 0) | at
    addends = []
    for index in islice(_coordinates(layout, list(added)), RANKS):
        ranks = islice((mesh.rank_at(**here | index | copy) for copy in _coordinates(layout, whole)), RANKS + 1)
        addends.append(_ranks(list(ranks), math.prod(map(mesh.axis_size, whole)), bracket=bool(added)))
    count = math.prod(map(mesh.axis_size, added))
    if count > RANKS:
        addends.append(f"... {count} addends")
    ops = set(added.values())
    return "+".join(addends) if ops <= {"sum"} else f"{'/'.join(sorted(ops))}({', '.join(addends)})"


def _coordinates(layout: Layout, axes: Sequence[str]) -> Iterator[Coordinate]:
    for index in product(*(range(layout.mesh.axis_size(axis)) for axis in axes)):
        yield dict(zip(axes, index, strict=True))


def _ranks(ranks: list[int], count: int, *, bracket: bool) -> str:
    if count > RANKS:
        text = f"{_runs(ranks[:2])} ... {count} ranks"
    else:
        text = _runs(ranks)
    return f"({text})" if bracket and count > 1 else text


def _runs(ranks: list[int]) -> str:
    """Three consecutive ranks or more as a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def _labelled(
    grid: list[list[str]], layout: Layout, shape: tuple[int, ...], row: int | None, column: int | None
) -> list[list[str]]:
    """The grid with a first row and column of the indices of each part."""

    def label(dim: int | None, at: Coordinate | None) -> str:
        if dim is None or at is None:
            return "" if dim is None else "..."
        rank = layout.mesh.rank_at(**dict.fromkeys(layout.mesh.axis_names, 0) | at)
        part = layout.local_slices(shape, rank)[dim]
        return f"{part.start}:{part.stop}" if part.start < part.stop else "-"

    top = ["", *(label(column, at) for at in _parts(layout, column))]
    return [top, *([label(row, at), *cells] for at, cells in zip(_parts(layout, row), grid, strict=True))]


def _boxed(grid: list[list[str]], *, head: bool) -> list[str]:
    """Cells in boxes; with `head`, the first row and column stand outside them."""
    widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
    first = 1 if head else 0
    margin = widths[0] + 1 if head and widths[0] else 0
    rule = " " * margin + "+" + "+".join("-" * (width + 2) for width in widths[first:]) + "+"
    lines = []
    if head and any(grid[0]):
        lines.append(
            (" " * margin + " " + " ".join(f" {t:{w}} " for t, w in zip(grid[0][1:], widths[1:], strict=True))).rstrip()
        )
    for cells in grid[first:]:
        left = f"{cells[0]:>{widths[0]}} " if margin else ""
        lines += [
            rule,
            left + "|" + "|".join(f" {t:{w}} " for t, w in zip(cells[first:], widths[first:], strict=True)) + "|",
        ]
    return [*lines, rule]
