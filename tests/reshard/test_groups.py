"""Groups over several axes: who makes them, and what a compiled graph calls them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from weft.mesh import ProcessMesh
from weft.reshard.running.groups import device_mesh, group_named, groups_over, name_of

from tests.support.pool import Pool

CUBE = ProcessMesh.grid(dp=2, cp=2, tp=2)
NAME = "groups 0 1 2 3, 4 5 6 7"  # of the groups over cp and tp


def members(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the group, as its own gather tells them."""
    ranks = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]), group=group)
    return ranks.tolist()


def over_two_axes() -> tuple[list[int], str, bool]:
    (group,) = groups_over(device_mesh(CUBE, "cpu"), ("cp", "tp"))
    return members(group), name_of(group), group_named(NAME) is group


def named_first(others: int) -> list[int]:
    """In a program that runs a graph of an earlier one, and has made other groups."""
    for _ in range(others):
        dist.new_group()
    return members(group_named(NAME))


@pytest.fixture
def halves() -> list[list[int]]:
    return [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def test_over_two_axes_of_the_whole_world_there_is_one_group(pool: Pool, halves):
    assert pool.run(over_two_axes, ranks=8) == [(ranks, NAME, True) for ranks in halves]


@pytest.mark.parametrize("others", [0, 3])
def test_a_graph_kept_of_another_program_has_its_groups_made(pool: Pool, halves, others):
    assert pool.run(named_first, others, ranks=8) == halves


def over_everything() -> tuple[list[int], str]:
    (group,) = groups_over(device_mesh(ProcessMesh.grid(dp=2, tp=2), "cpu"), ("dp", "tp"))
    return members(group), name_of(group)


def test_over_all_axes_it_is_the_worlds(pool: Pool):
    assert pool.run(over_everything, ranks=4) == [([0, 1, 2, 3], "0")] * 4


def along_axes() -> list[list[int]]:
    mesh = ProcessMesh.grid(dp=2, one=1, tp=2)
    groups = [groups_over(device_mesh(mesh, "cpu"), axes) for axes in (("one", "tp"), ("tp",))]
    return [members(group) for found in groups for group in found]


def test_an_axis_of_size_1_makes_no_group(pool: Pool):
    """Its own has this rank alone."""
    rows = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert pool.run(along_axes, ranks=4) == [[row, [rank], row] for rank, row in enumerate(rows)]
