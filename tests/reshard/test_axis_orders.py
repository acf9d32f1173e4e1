"""Layouts in every order of axes: DTensors keep their mesh, and ops combine them on one mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from weft import kernels
from weft.mesh import Layout, Partial, ProcessMesh, Replicate, Shard
from weft.reshard import distribute, layout_of, reshard, to_global

from tests.support.pool import Pool
from tests.support.sample import Portion

GRID = ProcessMesh.grid(dp=2, tp=2)
MESHES = (
    GRID,
    GRID.permute("tp", "dp"),
    ProcessMesh([[3, 1], [0, 2]], ["dp", "tp"]),
    ProcessMesh.grid(dp=2, cp=1, tp=2),
    ProcessMesh.grid(dp=2, cp=2, tp=2),
    ProcessMesh.grid(dp=2, cp=2, tp=2).permute("tp", "dp", "cp"),
    ProcessMesh([[5, 1]], ["dp", "tp"]),
)
WHOLE = torch.arange(48.0).reshape(8, 6)


def in_every_order(mesh: ProcessMesh) -> Iterator[Layout]:
    placements = (Shard(0), Shard(1), Replicate(), Partial())
    for names in itertools.permutations(mesh.axis_names):
        for chosen in itertools.product(placements, repeat=mesh.ndim):
            yield Layout.in_order(mesh, dict(zip(names, chosen, strict=True)))


def kept(layouts: list[Layout]) -> None:
    """A DTensor keeps its layout, also through torch's ops."""
    for layout in layouts:
        x = distribute(WHOLE, layout)
        assert layout_of(x) == layout
        if not layout.is_partial():  # which torch would reduce
            assert layout_of(x.detach().clone()) == layout
        assert x.to_local().shape == layout.local_shape(WHOLE.shape, dist.get_rank())


@pytest.mark.exhaustive
def test_the_layout_of_a_dtensor_is_the_one_it_was_laid_in(portion: Portion, pool: Pool) -> None:
    each = [list(portion.of(dict.fromkeys(in_every_order(mesh)), every=20)) for mesh in MESHES]
    assert all(each)
    pool.run(kept, list(itertools.chain(*each)), ranks=8)


def met_in_ops() -> None:
    a, b = Layout(GRID, "tp: S(0), dp: S(0)"), Layout(GRID, "dp: S(0), tp: S(0)")
    x, y = distribute(WHOLE, a), distribute(WHOLE, b)
    total = kernels.add(reshard(x, placements=b), y)
    assert layout_of(total) == b
    assert torch.equal(to_global(total), 2 * WHOLE)
    there = kernels.add(x, reshard(y, x.device_mesh, x.placements))
    assert layout_of(there) == a
    assert torch.equal(there.full_tensor(), 2 * WHOLE)
    weight = distribute(torch.eye(6), Layout(GRID))
    for weighed in (weight, torch.eye(6)):
        out = kernels.linear(x, weighed)
        assert layout_of(out) == a
        assert torch.equal(to_global(out), WHOLE)


def test_tensors_that_lie_in_other_orders_meet_in_ops(pool: Pool) -> None:
    pool.run(met_in_ops, ranks=4)


def of_torch() -> None:
    """A user's own DeviceMesh equal to a mesh that expresses a shard order here keeps its own meaning."""
    distribute(WHOLE, Layout(GRID, "tp: S(0), dp: S(0)"))
    ranks = torch.tensor(GRID.ranks).reshape(2, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = type(mesh)("cpu", ranks.T, mesh_dim_names=("tp", "dp"))
    x = DTensor.from_local(torch.ones(2, 6), theirs, [TorchShard(0), TorchShard(0)], run_check=False)
    assert layout_of(x) == Layout(GRID.permute("tp", "dp"), [Shard(0), Shard(0)])


def test_a_permuted_mesh_of_torch_stays_what_it_is(pool: Pool) -> None:
    pool.run(of_torch, ranks=4)
