"""ASCII pictures of layouts: the cells into which a layout cuts a tensor, and the ranks holding each cell."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .placement import Partial, Placement
from .process_mesh import ProcessMesh

if TYPE_CHECKING:
    from rich.text import Text

CELLS = 6  # cells drawn along a dim; of more, the first ones and the last
ITEMS = 8  # ranges of ranks, or addends, listed in a cell; of more, the first two and their number
WIDTH = 72  # default columns of a picture; the first of FITS that is not wider is drawn
SLICES = 4  # grids drawn at most, where more than two dims are cut; beyond, a table with a line per rank
LINES = 16  # ranks in the table at most
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")  # of cells, on a terminal; colours add no information
# (columns of cells, items in a cell), widest first
FITS = ((CELLS, ITEMS), (4, ITEMS), (CELLS, 2), (4, 2), (3, 2), (4, 1), (3, 1), (3, 0))

Coordinate = dict[str, int]
ShapeOrNone = tuple[int, ...] | None
DimIndex = int | None  # a dim, or a part of a dim; None for no dim, or for parts left out


class Drawable(Protocol):
    """The part of `Layout` used for drawing. A protocol, because `layout.py` imports this module."""

    @property
    def mesh(self) -> ProcessMesh: ...
    @property
    def shard_order(self) -> Mapping[int, tuple[str, ...]]: ...
    def __getitem__(self, axis: str) -> Placement: ...
    def parts(self, dim: int) -> int: ...
    def local_slices(self, global_shape: Sequence[int], rank: int) -> tuple[slice, ...]: ...
    def check_shape(self, global_shape: Sequence[int]) -> None: ...


class Cell(NamedTuple):
    """The ranks which hold a part of a tensor, a cell of the picture."""

    # For each addend, the ranges of the ranks with a replica. Only the first ITEMS addends, as a cell shows no more.
    addends: list[list[str]]
    replicas: int  # ranks that hold each addend
    total: int  # number of addends
    op: str  # reduction of the addends


def draw(layout: Drawable, global_shape: Sequence[int] | None = None, *, width: int = WIDTH) -> list[str]:
    """The picture of a layout, as lines: a grid whose rows cut the first sharded dim and whose columns cut the second.

    A single sharded dim is drawn as rows if it is dim 0, else as columns; with the shape, a vector is drawn as
    columns. A cell names the ranks holding the part; where the layout is Partial, the ranks holding each addend: `0+1`,
    `max(0, 1)`. With the shape, the indices of each part are written beside the grid.

    Where more than two dims are sharded, each part of the further dims has a separate grid. Instead of more than
    SLICES grids, a table has a line per rank.

    width: the columns that the picture should fit in.
    Raises LayoutError where a sharded dim is outside a tensor of this shape.
    """
    shape = None if global_shape is None else tuple(global_shape)
    if shape is not None:
        layout.check_shape(shape)
    cut = [dim for dim in layout.shard_order if layout.parts(dim) > 1]
    vector = shape is not None and len(shape) == 1
    row = cut[0] if len(cut) > 1 or (cut == [0] and not vector) else None
    column = next((dim for dim in cut if dim != row), None)
    further = cut[2:]
    if math.prod(map(layout.parts, further)) > SLICES:
        return _table(layout, shape, cut)
    lines = []
    if cut[:2] not in ([], [0], [1], [0, 1]):
        lines.append(", ".join(f"{side}: dim {d}" for side, d in (("rows", row), ("columns", column)) if d is not None))
    for index in product(*(range(layout.parts(dim)) for dim in further)):
        at = {dim: _coordinate(layout, dim, part) for dim, part in zip(further, index, strict=True)}
        if at:
            lines.append(", ".join(f"dim {dim}: {_label(layout, shape, dim, part)}" for dim, part in at.items()))
        fixed = {axis: i for part in at.values() for axis, i in part.items()}
        lines += _grid(layout, shape, row, column, fixed, width)
    return lines


def coloured(picture: str) -> Text:
    """A text with pictures, also side by side, as rich's Text; cells with the same content get the same colour."""
    from rich.text import Text

    text = Text(picture)
    colours: dict[str, str] = {}
    for cell in re.finditer(r"(?<=\|) (?!\.\.\. )\S[^|\n]*(?=\|)", text.plain):
        colour = colours.setdefault(cell[0].strip(), COLOURS[len(colours) % len(COLOURS)])
        text.stylize(colour, *cell.span())
    return text


def _grid(
    layout: Drawable, shape: ShapeOrNone, row: DimIndex, column: DimIndex, fixed: Coordinate, width: int
) -> list[str]:
    """The lines of a grid, with fewer columns and shorter lists of ranks until the lines fit the width.

    row, column: the dims drawn. fixed: the part of every further dim, as indices along the axes that cut the dim.
    """
    down, most = _parts_to_draw(layout, row, CELLS), _parts_to_draw(layout, column, CELLS)
    cells: dict[tuple[DimIndex, DimIndex], Cell] = {
        (i, j): _cell(layout, fixed | _coordinate(layout, row, i) | _coordinate(layout, column, j))
        for i, j in product(down, most)
        if i is not None and j is not None
    }
    left = {i: "..." if i is None else _label(layout, shape, row, _coordinate(layout, row, i)) for i in down}
    top = {j: _label(layout, shape, column, _coordinate(layout, column, j)) for j in most if j is not None}
    lines: list[str] = []
    for columns, items in FITS:
        across = _parts_to_draw(layout, column, columns)
        grid = [["..." if None in (i, j) else _text(cells[i, j], items) for j in across] for i in down]
        if shape is not None:
            names = ["", *("..." if j is None else top[j] for j in across)]
            grid = [names, *([left[i], *line] for i, line in zip(down, grid, strict=True))]
        lines = _boxed(grid, head=shape is not None)
        if max(map(len, lines)) <= width:
            break
    return lines


def _table(layout: Drawable, shape: ShapeOrNone, cut: list[int]) -> list[str]:
    """A line for each rank: the part of each sharded dim, and the addend along each Partial axis."""
    mesh = layout.mesh
    partial = [axis for axis in mesh.axis_names if isinstance(layout[axis], Partial)]
    rows = [["rank", *(f"dim {dim}" for dim in cut), *(f"{axis}: {layout[axis]}" for axis in partial)]]
    for rank, index in zip(islice(mesh, LINES), product(*map(range, mesh.shape)), strict=False):
        coordinate = dict(zip(mesh.axis_names, index, strict=True))
        addend = [f"{coordinate[axis]} of {mesh.axis_size(axis)}" for axis in partial]
        rows.append([str(rank), *(_label(layout, shape, dim, coordinate) for dim in cut), *addend])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([f"{r[0]:>{widths[0]}}", *map(str.ljust, r[1:], widths[1:])]).rstrip() for r in rows]
    return lines + ([f"... {mesh.size} ranks"] if mesh.size > LINES else [])


def _parts_to_draw(layout: Drawable, dim: DimIndex, most: int) -> list[DimIndex]:
    """The parts of a dim to draw; None stands for the parts left out."""
    count = 1 if dim is None else layout.parts(dim)
    return [*range(most - 2), None, count - 1] if count > most else [*range(count)]


def _coordinate(layout: Drawable, dim: DimIndex, part: DimIndex) -> Coordinate:
    """The coordinate of part `part` of a dim: an index along each axis that cuts the dim."""
    coordinate: Coordinate = {}
    if dim is not None and part is not None:
        for axis in reversed(layout.shard_order[dim]):
            part, coordinate[axis] = divmod(part, layout.mesh.axis_size(axis))
    return coordinate


def _label(layout: Drawable, shape: ShapeOrNone, dim: DimIndex, at: Coordinate) -> str:
    """The indices of the part of a dim at a coordinate, as 0:2; without the shape the number of the part, as 0 of 4."""
    if dim is None:
        return ""
    if shape is not None:
        rank = layout.mesh.rank_at(**dict.fromkeys(layout.mesh.axis_names, 0) | at)
        held = layout.local_slices(shape, rank)[dim]
        return f"{held.start}:{held.stop}" if held.start < held.stop else "-"
    part = 0
    for axis in layout.shard_order[dim]:
        part = part * layout.mesh.axis_size(axis) + at[axis]
    return f"{part} of {layout.parts(dim)}"


def _cell(layout: Drawable, at: Coordinate) -> Cell:
    """The ranks at the coordinate `at` of the sharding axes, as a list per addend."""
    mesh = layout.mesh
    at = dict.fromkeys((axis for axes in layout.shard_order.values() for axis in axes), 0) | at
    added = {a: p.op for a in mesh.axis_names if isinstance(p := layout[a], Partial) and mesh.axis_size(a) > 1}
    sizes = [mesh.axis_size(axis) for axis in added]
    indices = (at | dict(zip(added, index, strict=True)) for index in product(*map(range, sizes)))
    addends = [_ranks(mesh, index) for index in islice(indices, ITEMS)]
    op = "/".join(sorted(set(added.values()))) or "sum"
    return Cell([_runs(ranks) for ranks in addends], len(addends[0]), math.prod(sizes), op)


def _ranks(mesh: ProcessMesh, at: Coordinate) -> list[int]:
    """The ranks at a coordinate, which may leave out axes, in increasing order."""
    return sorted(mesh.select(**at)) if len(at) < mesh.ndim else [mesh.rank_at(**at)]


def _text(cell: Cell, items: int) -> str:
    """The cell as text, with at most `items` addends and at most `items` ranges of ranks in each."""
    listed_addends = cell.addends if cell.total <= max(items, 1) else cell.addends[: min(2, items)]
    pattern = "({})" if min(cell.replicas, cell.total) > 1 else "{}"
    addends = [pattern.format(_ranks_text(runs, cell.replicas, items)) for runs in listed_addends]
    if len(listed_addends) < cell.total:
        addends.append(f"... {cell.total} addends" if listed_addends else f"{cell.total} addends")
    return "+".join(addends) if cell.op == "sum" else f"{cell.op}({', '.join(addends)})"


def _ranks_text(runs: list[str], count: int, items: int) -> str:
    """The ranges of ranks as text; of more than `items`, the first two and the number of ranks."""
    if len(runs) <= max(items, 1):
        return " ".join(runs)
    return f"{' '.join(runs[: min(2, items)])} ... {count} ranks" if items else f"{count} ranks"


def _runs(ranks: list[int]) -> list[str]:
    """Increasing ranks as texts; three or more consecutive ranks become a range.

    Stops after more than ITEMS texts, too many to be listed.
    """
    runs: list[str] = []
    start = 0
    while start < len(ranks) and len(runs) <= ITEMS:
        # ranks[i] - i is constant within a run and grows after the run, and bisect finds the run's end.
        stop = bisect_right(range(len(ranks)), ranks[start] - start, lo=start, key=lambda i: ranks[i] - i)
        runs += [f"{ranks[start]}-{ranks[stop - 1]}"] if stop - start > 2 else map(str, ranks[start:stop])
        start = stop
    return runs


def _boxed(grid: list[list[str]], *, head: bool) -> list[str]:
    """Cells in boxes; with `head`, the first row and the first column are labels outside the boxes."""
    widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
    first = 1 if head else 0
    margin = widths[0] + 1 if head and widths[0] else 0

    def line(cells: list[str], between: str) -> str:
        return between.join(f" {t:{w}} " for t, w in list(zip(cells, widths, strict=True))[first:])

    rule = " " * margin + "+" + "+".join("-" * (width + 2) for width in widths[first:]) + "+"
    lines = [(" " * (margin + 1) + line(grid[0], " ")).rstrip()] if head and any(grid[0]) else []
    for cells in grid[first:]:
        lines += [rule, (f"{cells[0]:>{widths[0]}} " if margin else "") + f"|{line(cells, '|')}|"]
    return [*lines, rule]
