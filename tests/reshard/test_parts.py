"""Programs in which each rank works on its own part of the world, while other ranks are late or early by chance."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count, islice

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard, to_global
from weft.reshard.world.groups import device_mesh, group_of
from weft.reshard.world.world import _Members

from tests.support.limits import PATIENCE
from tests.support.pool import Pool
from tests.support.sample import Portion

CUBE = ProcessMesh.grid(pp=2, dp=2, tp=2)
RUNS = 50


def new_worlds(seconds: float = 60) -> Iterator[None]:
    """Yields once for each new world, in which no group has been made."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    master = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [master.port if master else 0]
    dist.broadcast_object_list(port, src=0)
    for number in count():
        dist.destroy_process_group()
        store = dist.TCPStore("localhost", port[0], is_master=False, timeout=timedelta(seconds=seconds))
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=ranks)
        yield


def late(chance: random.Random) -> None:
    """Sleep now and then, at different times on each rank."""
    if chance.random() < 0.5:
        time.sleep(chance.random() * 0.02)


def values(mesh: ProcessMesh) -> torch.Tensor:
    """A tensor whose values are unique to the mesh."""
    return 1000 * torch.tensor(mesh.ranks).sum() + torch.arange(16.0).reshape(8, 2)


def part_of_torch(chance: random.Random) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    part = mesh["dp", "tp"]
    ours = ProcessMesh(part.mesh.tolist(), ("dp", "tp"))
    whole = values(ours)
    late(chance)
    local = whole[Layout(ours, "dp: S(0), tp: S(0)").local_slices(whole.shape, dist.get_rank())]
    x = DTensor.from_local(local, part, [Shard(0), Shard(0)], run_check=False)
    assert torch.equal(to_global(x), whole)


def parts_of_ours(chance: random.Random) -> None:
    """Parts along each axis with this rank; any two parts share it.

    The rank takes one part after another, each part also with its axes reversed.
    """
    rank = dist.get_rank()
    for axis, index in (CUBE.coordinate(rank) or {}).items():
        for part in (CUBE.select(**{axis: index}), CUBE.select(**{axis: index}).permute(*other(axis))):
            late(chance)
            x = distribute(values(part), Layout(part, [Shard(0), Shard(0)]))
            late(chance)
            assert torch.equal(to_global(x), values(part))


def other(axis: str) -> list[str]:
    return [name for name in reversed(CUBE.axis_names) if name != axis]


def shuffled_parts(chance: random.Random) -> None:
    """Meshes of random ranks in random order; each rank takes part in its own meshes, in the common order."""
    drawn = random.Random(dist.get_world_size())
    for _ in range(6):
        ranks = drawn.sample(range(8), drawn.choice((2, 3, 4, 6)))
        shape = (2, len(ranks) // 2) if len(ranks) % 2 == 0 else (len(ranks), 1)
        mesh = ProcessMesh(torch.tensor(ranks).reshape(shape), ("a", "b"))
        if dist.get_rank() in mesh:
            late(chance)
            x = distribute(values(mesh), Layout(mesh, "b: S(0), a: S(0)"))
            late(chance)
            y = reshard(x, placements="a: S(1)")
            assert torch.equal(to_global(y), values(mesh))


def repeated(program: Callable[[random.Random], None], runs: list[int]) -> None:
    for run, _ in zip(runs, new_worlds(), strict=False):
        program(random.Random(8 * run + dist.get_rank()))
        dist.barrier()


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [part_of_torch, parts_of_ours, shuffled_parts])
def test_each_rank_gets_the_values_of_its_own_part(pool: Pool, portion: Portion, program) -> None:
    pool.run(repeated, program, list(portion.of(range(RUNS), every=25)), ranks=8, timeout=PATIENCE)


def other_groups() -> str:
    """Rank 0 wants a group with ranks 1 and 3, rank 1 a group with rank 2; ranks 2 and 3 make no group."""
    told = ""
    for _ in islice(new_worlds(seconds=2), 1):
        if (rank := dist.get_rank()) < 2:
            with pytest.raises(RuntimeError) as failed:
                group_of([(0, 1, 3), (1, 2)][rank])
            told = str(failed.value)
        dist.barrier()
    return told


@pytest.mark.exhaustive
def test_members_that_make_another_group_are_named(pool: Pool) -> None:
    first, second, *_ = pool.run(other_groups, ranks=4)
    assert first.startswith(
        "rank 0 waited 2 s for the others to make a group of ranks 0, 1, 3 on gloo. "
        "Rank 1 makes one of ranks 1, 2 on gloo. Rank 3 did not come, and makes no other group."
    )
    assert second.startswith(
        "rank 1 waited 2 s for the others to make a group of ranks 1, 2 on gloo. "
        "Rank 2 did not come, and makes no other"
    )


def known_otherwise() -> str:
    """A member has announced other ranks for the group of this name."""
    store = dist.HashStore()
    store.set("name/ranks", "ranks 0, 2 on gloo")
    with pytest.raises(RuntimeError) as failed:
        _Members(store, "name", "ranks 0, 1 on gloo", [0, 1], 0).meet("to make")
    return str(failed.value)


def test_members_that_know_other_ranks_do_not_meet(pool: Pool) -> None:
    told = "rank 0 makes a group of ranks 0, 1 on gloo, and another rank made a group of ranks 0, 2 on gloo by"
    assert pool.run(known_otherwise, ranks=1)[0].startswith(told)


def outside() -> list[int]:
    """Only members make their groups; the remaining ranks go on, and have the mesh, too."""
    mesh = device_mesh(ProcessMesh([[1, 2]], ["dp", "tp"]), "cpu")
    assert mesh.shape == (1, 2)
    assert mesh["tp"].mesh_dim_names == ("tp",)
    return dist.get_process_group_ranks(mesh.get_group("tp")) if dist.get_rank() in (1, 2) else []


def test_ranks_outside_make_nothing(pool: Pool) -> None:
    assert pool.run(outside, ranks=4) == [[], [1, 2], [1, 2], []]
