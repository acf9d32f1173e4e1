"""A world leaves no groups when its process ends: their threads would need an interpreter that is gone."""

from __future__ import annotations

import pytest

from tests.support.programs import run_alone

USED = {
    "nothing": "",
    "a-layout-change": 'reshard(distribute(torch.ones(2), Layout(mesh, "tp: S(0)")), Layout(mesh)).to_local()',
    "an-op": "import weft.kernels; weft.kernels.add(*[distribute(torch.ones(2), Layout(mesh))] * 2)",
}
# Uses a world in forks, each with an interpreter's end of its own; the modules are imported once.
PROGRAM = """
import atexit, os, sys, weakref
import torch
import torch.distributed as dist

groups = []
# Called after all that is registered later.
atexit.register(lambda: print(name, "kept" if groups[0]() is not None else "gone"))

from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard

for name, used in {used!r}.items():
    if os.fork() == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = ProcessMesh.grid(tp=1)
        groups.append(weakref.ref(dist.group.WORLD))
        exec(used)
        dist.destroy_process_group()
        sys.exit()
    assert os.wait()[1] == 0
os._exit(0)  # without a world there is nothing to print
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By use of a world, whether its group is kept or gone when the interpreter ends."""
    printed = run_alone(PROGRAM.format(used=USED), tmp_path_factory.mktemp("exit"))
    return dict(line.split() for line in printed.splitlines())


@pytest.mark.parametrize("used", USED)
def test_a_destroyed_world_is_gone_before_the_interpreter(used: str, ends: dict[str, str]) -> None:
    assert ends[used] == "gone"
