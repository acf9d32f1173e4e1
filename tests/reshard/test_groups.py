"""Groups over several axes: which ranks make them, and their names in a compiled graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from weft.mesh import ProcessMesh
from weft.reshard.world.groups import device_mesh, graph_name_of, group_named, group_of, group_over

from tests.support.pool import Pool

CUBE = ProcessMesh.grid(dp=2, cp=2, tp=2)
NAMES = ["ranks 0 1 2 3", "ranks 4 5 6 7"]  # of the groups over cp and tp


def members(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the group, as its own all-gather reports them."""
    ranks = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]), group=group)
    return ranks.tolist()


def over_two_axes(mesh: ProcessMesh) -> tuple[list[int], str, bool]:
    group = group_over(device_mesh(mesh, "cpu"), ("cp", "tp"))
    name = graph_name_of(group)
    return members(group), name, group_named(name) is group


def named_first(others: int) -> list[int]:
    """Ranks of a named group in a program that runs a graph compiled earlier, after making unrelated groups."""
    for _ in range(others):
        dist.new_group()
    return members(group_named(NAMES[dist.get_rank() // 4]))


@pytest.fixture
def halves() -> list[list[int]]:
    return [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def test_over_two_axes_there_is_one_group(pool: Pool, halves):
    found = pool.run(over_two_axes, CUBE, ranks=8)
    assert found == [(ranks, NAMES[rank // 4], True) for rank, ranks in enumerate(halves)]


def over_two_axes_of_a_part() -> tuple[list[int], str, bool] | None:
    """Ranks outside the mesh have no group to make."""
    part = ProcessMesh.grid(dp=1, cp=2, tp=2, first_rank=1)
    return over_two_axes(part) if dist.get_rank() in part else None


def test_over_two_axes_of_a_part_of_the_world_there_is_one_group(pool: Pool):
    expected = ([1, 2, 3, 4], "ranks 1 2 3 4", True)
    assert pool.run(over_two_axes_of_a_part, ranks=6) == [None, *[expected] * 4, None]


@pytest.mark.few(1)
@pytest.mark.parametrize("others", [0, 3])
def test_a_graph_kept_of_another_program_has_its_groups_made(pool: Pool, halves, others):
    assert pool.run(named_first, others, ranks=8) == halves


def over_everything() -> tuple[list[int], str]:
    group = group_over(device_mesh(ProcessMesh.grid(dp=2, tp=2), "cpu"), ("dp", "tp"))
    return members(group), graph_name_of(group)


def test_over_all_axes_it_is_the_worlds(pool: Pool):
    assert pool.run(over_everything, ranks=4) == [([0, 1, 2, 3], "0")] * 4


def along_axes() -> list[list[int]]:
    mesh = device_mesh(ProcessMesh.grid(dp=2, one=1, tp=2), "cpu")
    return [members(group_over(mesh, axes)) for axes in (("one", "tp"), ("tp",), ("one",))]


def test_an_axis_of_size_1_makes_no_group(pool: Pool):
    """An axis of size 1 has a group of this rank alone."""
    rows = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert pool.run(along_axes, ranks=4) == [[row, row, [rank]] for rank, row in enumerate(rows)]


def in_a_world_bound_to_a_device() -> tuple[list[int], torch.device, torch.device]:
    """A world like NCCL's after init_process_group(device_id=...).

    torch would split its communicator, which all ranks of the world must call.
    """
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0")
    if dist.get_rank() == 2:
        return [], world.bound_device_id, world.bound_device_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_split_source", None)  # raises if called
        group = group_of((0, 1))
    return members(group), group.bound_device_id, world.bound_device_id


def test_the_worlds_communicator_is_not_split(pool: Pool):
    bound = torch.device("cuda:0")
    assert pool.run(in_a_world_bound_to_a_device, ranks=3) == [([0, 1], bound, bound)] * 2 + [([], bound, bound)]
