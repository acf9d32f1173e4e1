"""Compiled code that calls reshard before Weft has made or used a DTensor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.limits import PATIENCE

PROGRAM = """
import sys
import torch, torch.distributed as dist
{first}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from weft.reshard import reshard
assert ("torch._dynamo" in sys.modules) == {imported}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
x = DTensor.from_local(torch.arange(6.0), mesh, [Shard(0)], run_check=False)
run = torch.compile(lambda x: reshard(x, placements=[Replicate()]), fullgraph=True, backend="aot_eager")
print(run(x).placements, run(x).to_local().tolist())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", id="dynamo-later"),
        pytest.param("import torch._dynamo", id="dynamo-first"),
    ],
)
def test_reshard_compiles_before_weft_has_used_a_dtensor(first: str) -> None:
    program = PROGRAM.format(first=first, imported=bool(first))
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "(Replicate(),) [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n"
