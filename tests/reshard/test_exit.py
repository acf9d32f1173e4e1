"""A world leaves no groups when its process ends: their threads would need an interpreter that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import run_alone

USED = {  # the last, which loads most of Weft, is the sample
    "nothing": "",
    "a-layout-change": 'reshard(distribute(torch.ones(2), Layout(mesh, "tp: S(0)")), Layout(mesh)).to_local()',
    "an-op": "import weft.kernels; weft.kernels.add(*[distribute(torch.ones(2), Layout(mesh))] * 2)",
}
PROGRAM = """
import atexit, weakref
import torch
import torch.distributed as dist

groups = []
# Called after all that is registered later.
atexit.register(lambda: print("kept" if groups[0]() is not None else "gone"))

from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = ProcessMesh.grid(tp=1)
groups.append(weakref.ref(dist.group.WORLD))
{used}
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "used",
    [
        pytest.param(used, id=name, marks=() if name == "an-op" else pytest.mark.exhaustive)
        for name, used in USED.items()
    ],
)
def test_a_destroyed_world_is_gone_before_the_interpreter(used: str, tmp_path: Path) -> None:
    """Each use in a process of its own, for the interpreter's end."""
    assert run_alone(PROGRAM.format(used=used), tmp_path) == "gone\n"
