"""A world leaves no groups when its process ends: their threads would need an interpreter that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import run_alone

PROGRAM = """
import atexit
import weakref

import torch
import torch.distributed as dist

groups = []
atexit.register(lambda: print("kept" if groups[0]() is not None else "gone"))  # after what is registered later

from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = ProcessMesh.grid(tp=1)
groups.append(weakref.ref(dist.group.WORLD))
{used}
dist.destroy_process_group()
"""
USED = {
    "nothing": "",
    "a-layout-change": 'reshard(distribute(torch.ones(2), Layout(mesh, "tp: S(0)")), Layout(mesh)).to_local()',
    "an-op": "import weft.kernels; weft.kernels.add(*[distribute(torch.ones(2), Layout(mesh))] * 2)",
}


@pytest.mark.parametrize("used", USED)
def test_a_destroyed_world_is_gone_before_the_interpreter(used: str, tmp_path: Path) -> None:
    assert run_alone(PROGRAM.format(used=USED[used]), tmp_path).split() == ["gone"]
