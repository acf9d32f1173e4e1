"""A world leaves no groups when its process ends: their threads would need an interpreter that is gone."""

from __future__ import annotations

import pytest

from tests.support.programs import run_alone

PROGRAM = """
import atexit
import weakref

groups = []
# Called after all that is registered later.
atexit.register(lambda: print({name!r}, "kept" if groups[0]() is not None else "gone"))

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
# Runs programs, each in a fork with an interpreter's end of its own; torch is imported once.
FORKS = """
import os, sys
import torch
import torch.distributed as dist

for program in {programs!r}:
    if os.fork() == 0:
        exec(program)
        sys.exit()
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By use of a world, whether its group is kept or gone when the interpreter ends."""
    programs = [PROGRAM.format(name=name, used=used) for name, used in USED.items()]
    printed = run_alone(FORKS.format(programs=programs), tmp_path_factory.mktemp("exit"))
    return dict(line.split() for line in printed.splitlines())


@pytest.mark.parametrize("used", USED)
def test_a_destroyed_world_is_gone_before_the_interpreter(used: str, ends: dict[str, str]) -> None:
    assert ends[used] == "gone"
