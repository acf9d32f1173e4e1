"""A repeated reshard plans nothing: counts the Python calls inside the packages, and changes of file between calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import weft.mesh
import weft.reshard
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard

from tests.support.pool import Pool

FOLDERS = tuple(str(Path(module.__file__ or "").parent) for module in (weft.mesh, weft.reshard))
WARM_UP = 3


def files_called(function: Callable[[], object]) -> list[str]:
    """The file of each Python function of weft.mesh and weft.reshard called by a warm `function()`, in order."""
    for _ in range(WARM_UP):
        function()
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return files


def count(src: str, dst: Any) -> tuple[int, int]:
    """The number of calls in a warm reshard on four ranks, and how often the file changes from call to call."""
    x: DTensor = distribute(torch.arange(64.0).reshape(8, 8), Layout(ProcessMesh.grid(dp=2, tp=2), src))
    files = files_called(lambda: reshard(x, placements=dst))
    return len(files), sum(a != b for a, b in pairwise(files))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param("tp: S(0)", None, id="all-gather"),
        pytest.param("tp: S(1)", "", id="all-gather-of-columns"),
        pytest.param("tp: P(sum)", "tp: S(0)", id="reduce-scatter"),
        pytest.param("tp: P(sum)", None, id="all-reduce"),
        pytest.param("tp: S(0)", "tp: S(1)", id="all-to-all"),
        pytest.param("", "tp: S(0)", id="slice"),
        pytest.param("tp: S(0)", {"tp": weft.mesh.Replicate()}, id="placements-by-name"),
        pytest.param("tp: S(0)", [weft.mesh.Replicate(), weft.mesh.Replicate()], id="placements-in-a-list"),
    ],
)
def test_a_repeated_reshard_prepares_nothing_again(src: str, dst: Any, pool: Pool) -> None:
    for calls, changes in pool.run(count, src, dst, ranks=4):
        assert 0 < calls <= 80
        assert changes <= 30
