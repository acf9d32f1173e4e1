"""Pictures of layouts, which show each rank's part."""

import io
import re

import pytest
import torch
from rich.console import Console
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh
from weft.mesh.picture import coloured, draw

from tests.support.limits import python_ratio
from tests.support.shards import every_layout, split

GRID = ProcessMesh.grid(dp=2, tp=2)
SCATTERED = ProcessMesh([[7, 3], [0, 12]], ["dp", "tp"])
FOUR = "+-----+-----+-----+-----+"


def case(name, text, shape, *picture, mesh=GRID):
    return pytest.param(Layout(mesh, text), shape, list(picture), id=name)


CASES = [
    case("replicated", "", None, "+-----+", "| 0-3 |", "+-----+"),
    case("rows", "dp: S(0)", None, "+-----+", "| 0 1 |", "+-----+", "| 2 3 |", "+-----+"),
    case("columns", "dp: S(1)", None, "+-----+-----+", "| 0 1 | 2 3 |", "+-----+-----+"),
    case("both", "dp: S(0), tp: S(1)", None, "+---+---+", "| 0 | 1 |", "+---+---+", "| 2 | 3 |", "+---+---+"),
    case(
        "major-first", "dp: S(0), tp: S(0)", (8,), *("  0:2   2:4   4:6   6:8", FOUR, "| 0   | 1   | 2   | 3   |", FOUR)
    ),
    case(
        "minor-first", "tp: S(0), dp: S(0)", (8,), *("  0:2   2:4   4:6   6:8", FOUR, "| 0   | 2   | 1   | 3   |", FOUR)
    ),
    case("uneven", "dp: S(0), tp: S(0)", (5,), *("  0:2   2:3   3:4   4:5", FOUR, "| 0   | 1   | 2   | 3   |", FOUR)),
    case("addends", "tp: P", None, "+-------------+", "| (0 2)+(1 3) |", "+-------------+"),
    case("addends-on-both", "dp: P, tp: P", None, "+---------+", "| 0+1+2+3 |", "+---------+"),
    case(
        "another-reduction",
        "dp: S(0), tp: P(max)",
        (3, 2),
        *("    +-----------+", "0:2 | max(0, 1) |", "    +-----------+", "2:3 | max(2, 3) |", "    +-----------+"),
    ),
    case("average", "dp: P(avg)", None, "+-------------------+", "| avg((0 1), (2 3)) |", "+-------------------+"),
    case(
        "mixed",
        "dp: P(max), tp: P",
        None,
        *("+---------------------+", "| max/sum(0, 1, 2, 3) |", "+---------------------+"),
    ),
    case(
        "uneven-and-empty",
        "dp: S(0), tp: S(1)",
        (1, 3),
        *("      0:2   2:3", "    +-----+-----+", "0:1 | 0   | 1   |"),
        *("    +-----+-----+", "  - | 2   | 3   |", "    +-----+-----+"),
    ),
    case("no-elements", "dp: S(1)", (3, 0), "  -     -", "+-----+-----+", "| 0 1 | 2 3 |", "+-----+-----+"),
    case("scalar", "tp: P", (), "+-------------+", "| (0 2)+(1 3) |", "+-------------+"),
    case(
        "later-dims",
        "dp: S(1), tp: S(2)",
        None,
        *("rows: dim 1, columns: dim 2", "+---+---+", "| 0 | 1 |", "+---+---+", "| 2 | 3 |", "+---+---+"),
    ),
    case(
        "three-cut-dims",
        "pp: S(0), dp: S(1), tp: S(2)",
        (4, 1, 3),
        *("dim 2: 0:2", "      0:1   -"),
        *("    +-----+---+", "0:2 | 0   | 2 |", "    +-----+---+", "2:4 | 4   | 6 |", "    +-----+---+"),
        *("dim 2: 2:3", "      0:1   -"),
        *("    +-----+---+", "0:2 | 1   | 3 |", "    +-----+---+", "2:4 | 5   | 7 |", "    +-----+---+"),
        mesh=ProcessMesh.grid(pp=2, dp=2, tp=2),
    ),
    case(
        "arbitrary-ranks",
        "tp: S(0)",
        (2, 2),
        *("    +------+", "0:1 | 0 7  |", "    +------+", "1:2 | 3 12 |", "    +------+"),
        mesh=SCATTERED,
    ),
    case("permuted-ranks", "", None, "+-----+", "| 0-3 |", "+-----+", mesh=GRID.permute("tp", "dp")),
    case(
        "axes-of-size-one",
        "pp: S(1), dp: P(max), tp: S(0)",
        (4, 4),
        *("    +---+", "0:2 | 0 |", "    +---+", "2:4 | 1 |", "    +---+"),
        mesh=ProcessMesh.grid(pp=1, dp=1, tp=2),
    ),
]


@pytest.mark.parametrize("layout, shape, picture", CASES)
def test_pictures(layout, shape, picture):
    assert draw(layout, shape) == picture
    assert layout.explain(shape).splitlines() == [f"{layout} on {layout.mesh}", *picture]


@pytest.mark.parametrize("shape", [(5, 4), (1, 3), (0, 2)])
@pytest.mark.parametrize("mesh", [SCATTERED, ProcessMesh.grid(dp=2, tp=3)], ids=["arbitrary-ranks", "grid"])
def test_every_rank_stands_in_the_cell_it_holds_and_in_no_other(mesh, shape):
    """A cell's labels select torch.chunk's part for its ranks; ranks of an addend share their Partial coordinates."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for layout in every_layout(mesh, 2, partials=(Partial("sum"), Partial("max"))):
        partial = [axis for axis in mesh.axis_names if isinstance(layout[axis], Partial)]
        held = split(whole, layout.replace(**dict.fromkeys(partial, "R")))
        seen = []
        for rows, columns, cell in cells_of(draw(layout, shape)):
            addends = addends_of(cell)
            for ranks in addends:
                seen += ranks
                assert len({tuple(mesh.coordinate(rank)[axis] for axis in partial) for rank in ranks}) == 1
                assert all(torch.equal(held[rank], whole[rows, columns]) for rank in ranks), (str(layout), cell)
            assert len(addends) == torch.Size([mesh.axis_size(axis) for axis in partial]).numel()
        assert sorted(seen) == sorted(mesh.ranks), str(layout)


def cells_of(lines):
    """Index of the rows, index of the columns and text of each cell."""
    head = [] if "+" in lines[0] else lines[0].split()
    for line in lines:
        if "|" in line:
            label, *cells, _ = line.split("|")
            for at, cell in enumerate(cells):
                yield slice_of(label.strip()), slice_of(head[at] if head else ""), cell.strip()


def slice_of(label):
    return slice(*map(int, label.split(":"))) if ":" in label else slice(0, 0) if label else slice(None)


def addends_of(cell):
    """The ranks of each addend: `max((0 1), (2 4-6))` is [[0, 1], [2, 4, 5, 6]]."""
    addends = re.split(r"\+|, ", re.sub(r"^[a-z/]+\((.*)\)$", r"\1", cell))
    runs = [[run.split("-") for run in addend.strip("()").split()] for addend in addends]
    return [[rank for run in addend for rank in range(int(run[0]), int(run[-1]) + 1)] for addend in runs]


def test_many_parts_of_further_dims_become_a_line_for_each_rank():
    few = Layout(ProcessMesh.grid(a=2, b=2, c=2, d=2, e=1), "a: S(0), b: S(1), c: S(2), d: S(3)")
    slices = [line for line in draw(few) if "dim" in line]
    assert slices == [f"dim 2: {i} of 2, dim 3: {j} of 2" for i in range(2) for j in range(2)]
    many = Layout(ProcessMesh.grid(a=2, b=2, c=8, d=2), "a: S(0), b: S(1), c: S(2), d: P(max)")
    lines = draw(many, (4, 1, 9))
    assert lines[:4] == [
        "rank  dim 0  dim 1  dim 2  d: P(max)",
        "   0  0:2    0:1    0:2    0 of 2",
        "   1  0:2    0:1    0:2    1 of 2",
        "   2  0:2    0:1    2:4    0 of 2",
    ]
    assert lines[-2:] == ["  15  0:2    0:1    -      1 of 2", "... 64 ranks"]
    assert draw(many)[4] == "   3  0 of 2  0 of 2  1 of 8  1 of 2"


HUGE = {"dp": 128, "pp": 8, "cp": 8, "tp": 16}


def test_a_long_list_of_ranks_is_cut_short():
    mesh = ProcessMesh.grid(**HUGE)
    assert draw(Layout(mesh, "dp: S(0)"))[-2] == "| 130048-131071 |"
    assert draw(Layout(mesh))[1] == "| 0-131071 |"
    assert draw(Layout(mesh, "tp: P"))[1] == "| (0 16 ... 8192 ranks)+(1 17 ... 8192 ranks)+... 16 addends |"
    assert draw(Layout(mesh, "dp: S(0), tp: S(1)"), (4096, 4096))[:3] == [
        "            0:256                 ...   3840:4096",
        "          +---------------------+-----+---------------------+",
        "     0:32 | 0 ... 64 ranks      | ... | 15 ... 64 ranks     |",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "dp: S(0)", "dp: S(0), tp: S(1)", "dp: S(1), pp: S(1), cp: P, tp: S(0)", "dp: P, pp: P(max), tp: S(1)"]
    + ["dp: S(0), pp: S(1), tp: S(2)", "dp: P(avg), pp: P(avg), cp: P(avg), tp: P(avg)", "tp: S(1), dp: S(1)"],
)
def test_pictures_of_large_meshes_are_small(text):
    for mesh in (ProcessMesh.grid(**HUGE), ProcessMesh.grid(**HUGE).permute("tp", "cp", "dp", "pp")):
        for shape in (None, (4096, 4096, 7), (10**9, 10**9, 10**9)):
            lines = draw(Layout(mesh, text), shape)
            assert len(lines) <= 18
            assert max(map(len, lines)) <= 72
            assert all(line.isascii() and line == line.rstrip() for line in lines)


@pytest.mark.parametrize("text", ["", "dp: S(0), tp: S(1)", "dp: P, tp: S(0)"])
def test_a_mesh_of_131072_ranks_is_drawn_at_once(text):
    layout = Layout(ProcessMesh.grid(**HUGE), text)
    layout.local_slices((4096, 4096), 0)  # the mesh's own index of its ranks is made once

    assert python_ratio(lambda: draw(layout, (4096, 4096))) < 55


@pytest.mark.parametrize("shape", [None, (4096, 4096)], ids=str)
@pytest.mark.parametrize("text", ["", "tp: S(0)", "dp: S(0), tp: S(1)", "tp: S(1)"])
def test_a_picture_fits_a_narrow_terminal(text, shape):
    layout = Layout(ProcessMesh.grid(**HUGE), text)
    wide, narrow = layout.explain(shape).splitlines()[1:], layout.explain(shape, width=40).splitlines()[1:]
    assert max(map(len, narrow)) <= 40
    assert narrow == wide or max(map(len, wide)) > 40


def test_a_dim_that_the_tensor_does_not_have_is_refused():
    with pytest.raises(LayoutError, match="shards dim 1 of a tensor of shape"):
        Layout(ProcessMesh.grid(dp=1), "dp: S(1)").explain((8,))


class TestOnATerminal:
    """rich is in the environment of the tests; weft.mesh itself does not need it."""

    def shown(self, layout: Layout, **settings: object) -> str:
        console = Console(file=io.StringIO(), width=100, **settings)
        console.print(layout)
        return console.file.getvalue()

    def test_cells_that_hold_the_same_have_one_colour(self):
        text = self.shown(
            Layout(ProcessMesh.grid(dp=2, tp=2), "tp: S(0)"), force_terminal=True, color_system="standard"
        )
        assert "\x1b[36m 0 2 \x1b[0m" in text
        assert "\x1b[33m 1 3 \x1b[0m" in text

    def test_arrows_and_left_out_cells_have_no_colour(self):
        text = coloured("+---+      +-----+-----+\n| 0 |  ->  | ... | 0   |\n+---+      +-----+-----+")
        coloured_parts = [(text.plain[span.start : span.end], span.style) for span in text.spans]
        assert coloured_parts == [(" 0 ", "cyan"), (" 0   ", "cyan")]

    @pytest.mark.parametrize("settings", [{}, {"force_terminal": True, "no_color": True}], ids=["file", "no-colour"])
    def test_without_colour_it_is_the_same_picture(self, settings):
        layout = Layout(ProcessMesh.grid(dp=2, tp=2), "dp: P, tp: S(0)")
        assert self.shown(layout, **settings) == layout.explain() + "\n"
