"""Pictures of layouts: who holds what."""

import itertools
import time

import pytest
from weft.mesh import Layout, ProcessMesh
from weft.mesh.picture import draw

GRID = ProcessMesh.grid(dp=2, tp=2)
CASES = [
    pytest.param("", None, ["+-----+", "| 0-3 |", "+-----+"], id="replicated"),
    pytest.param("dp: S(0)", None, ["+-----+", "| 0 1 |", "+-----+", "| 2 3 |", "+-----+"], id="rows"),
    pytest.param("dp: S(1)", None, ["+-----+-----+", "| 0 1 | 2 3 |", "+-----+-----+"], id="columns"),
    pytest.param(
        "dp: S(0), tp: S(1)", None, ["+---+---+", "| 0 | 1 |", "+---+---+", "| 2 | 3 |", "+---+---+"], id="both"
    ),
    pytest.param(
        "tp: S(0), dp: S(0)",
        (8,),
        [
            "  0:2   2:4   4:6   6:8",
            "+-----+-----+-----+-----+",
            "| 0   | 2   | 1   | 3   |",
            "+-----+-----+-----+-----+",
        ],
        id="minor-first",
    ),
    pytest.param("dp: P", None, ["+-------------+", "| (0 1)+(2 3) |", "+-------------+"], id="addends"),
    pytest.param("dp: P, tp: P", None, ["+---------+", "| 0+1+2+3 |", "+---------+"], id="addends-on-both"),
    pytest.param(
        "dp: S(0), tp: P(max)",
        (3, 2),
        ["    +-----------+", "0:2 | max(0, 1) |", "    +-----------+", "2:3 | max(2, 3) |", "    +-----------+"],
        id="another-reduction",
    ),
    pytest.param(
        "dp: S(0), tp: S(1)",
        (1, 3),
        [
            "      0:2   2:3",
            "    +-----+-----+",
            "0:1 | 0   | 1   |",
            "    +-----+-----+",
            "  - | 2   | 3   |",
            "    +-----+-----+",
        ],
        id="uneven-and-empty",
    ),
    pytest.param(
        "dp: S(1), tp: S(2)",
        None,
        ["+---+---+", "| 0 | 2 |", "+---+---+", "the first of 2 parts of dim 2"],
        id="third-dim",
    ),
]


@pytest.mark.parametrize("text, shape, picture", CASES)
def test_pictures(text, shape, picture):
    layout = Layout(GRID, text)
    assert draw(layout, shape) == picture
    assert layout.explain(shape).splitlines() == [f"{layout} on {GRID}", *picture]


def test_every_rank_stands_in_the_cell_it_holds():
    """On meshes of any ranks: the cell at a part lists those whose slices are that part, and no others."""
    mesh = ProcessMesh([[7, 3], [0, 12]], ["a", "b"])
    for placements in itertools.product(("R", "S(0)", "S(1)"), repeat=2):
        layout = Layout(mesh, placements)
        cells = [cell.strip() for line in draw(layout) if line.startswith("|") for cell in line.strip("|").split("|")]
        by_part: dict[object, list[str]] = {}
        for rank in mesh.ranks:
            by_part.setdefault(str(layout.local_slices((4, 4), rank)), []).append(str(rank))
        assert sorted(cells) == sorted(" ".join(ranks) for ranks in by_part.values()), str(layout)


def test_large_meshes_are_drawn_in_part_and_at_once():
    mesh = ProcessMesh.grid(dp=128, pp=8, cp=8, tp=16)
    layout = Layout(mesh, "dp: S(0), tp: S(1)")
    start = time.perf_counter()
    text = layout.explain((4096, 4096))
    assert time.perf_counter() - start < 0.2
    assert "... 64 ranks" in text
    assert len(text.splitlines()) < 20
    assert max(map(len, text.splitlines())) < 170
    assert "1024 addends" in Layout(mesh, "dp: P, pp: P").explain()
