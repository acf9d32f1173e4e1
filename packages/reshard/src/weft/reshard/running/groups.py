"""Process meshes made into torch's DeviceMeshes, and back; the one place where process groups are created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.mesh.process_mesh import as_mesh

GROUPS = "groups"  # how the name of a group begins that tells its ranks, and those of all that are made with it


@dataclass(frozen=True, slots=True)
class _World:
    """What was made among the processes that one init_process_group() brought together: groups die with their world."""

    group: dist.ProcessGroup
    rank: int  # kept: every op on a DTensor asks for it
    made: dict[tuple[ProcessMesh, str], DeviceMesh] = field(default_factory=dict)
    known: dict[DeviceMesh, ProcessMesh] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    names: dict[dist.ProcessGroup, str] = field(default_factory=dict)  # see `name_of`
    kept: dict[Any, Any] = field(default_factory=dict)


_latest: _World | None = None


def device_mesh(mesh: ProcessMesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a process mesh, made once for each process group world and found by content afterwards.

    Communication: the first call for a mesh creates its groups, so every rank of the world must make it, in the same
    order. Raises RuntimeError without an initialized process group; ValueError for ranks that the world has not.
    """
    world, key = _world(), (mesh, device_type)
    if key not in world.made:
        size = dist.get_world_size()
        if max(mesh.ranks) >= size:
            raise ValueError(
                f"{mesh} names rank {max(mesh.ranks)}, but the world has {size} processes (0 to {size - 1})"
            )
        ranks = torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
        made = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names)
        world.made[key] = made
        world.known[made] = mesh
    return world.made[key]


def process_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The process mesh of a DeviceMesh; axes without names are called axis0, axis1, …"""
    world = _world()
    if mesh not in world.known:
        with unset_fake_temporarily():  # its ranks are numbers also where torch.compile traces
            world.known[mesh] = as_mesh(mesh)
        world.made.setdefault((world.known[mesh], mesh.device_type), mesh)
    return world.known[mesh]


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group of this rank along `axis`."""
    return mesh.get_group(process_mesh(mesh).axis(axis))


def group_along(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, list[int]]:
    """The group of this rank along `axes`, and the position along them, major first, of each of its members.

    torch sorts the ranks of a group; a mesh may list them in any order. Groups over several axes are those that
    `make_groups` made.
    """
    ranks = process_mesh(mesh).submesh(this_rank(), *axes).ranks
    group = axis_group(mesh, axes[0]) if len(axes) == 1 else group_of(tuple(sorted(ranks)))
    position = {rank: i for i, rank in enumerate(ranks)}
    return group, [position[rank] for rank in dist.get_process_group_ranks(group)]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `ranks`, ascending; made once for each process group world.

    Communication: the first call makes the group, so every rank of the world must make it, also those that are not in
    `ranks`, in the same order. (torch can make a group among its members alone, but names it by how many groups each
    of them has seen, which differs between ranks of overlapping meshes.)
    """
    world = _world()
    if len(ranks) == dist.get_world_size():
        return world.group
    if ranks not in world.groups:
        world.groups[ranks] = dist.new_group(list(ranks))
    return world.groups[ranks]


def make_groups(mesh: ProcessMesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Makes the groups of all sub-meshes along `axes`, whose ranks are returned. Communication: as in `group_of`."""
    groups = tuple(tuple(sorted(part.ranks)) for part in mesh.groups(*axes))
    for ranks in groups:
        group_of(ranks)
    return groups


def groups_over(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, ...]:
    """Groups of this rank that span `axes` one after the other, minor first: a single one, where all ranks of the world are in
    the mesh and so can make it; otherwise one an axis.

    Communication: as in `group_of`, but ranks outside of the mesh have nothing to make.
    """
    whole = process_mesh(mesh)
    wide = [axis for axis in axes if whole.axis_size(axis) > 1]
    if len(wide) > 1 and whole.size == dist.get_world_size():
        with unset_fake_temporarily():
            made = make_groups(whole, wide)
        (group, _), names = group_along(mesh, wide), _world().names
        if group is not _world().group:
            names[group] = f"{GROUPS} {', '.join(' '.join(map(str, ranks)) for ranks in made)}"
        return (group,)
    return tuple(axis_group(mesh, axis) for axis in reversed(axes))


def of_this_world() -> dict[Any, Any]:
    """A place for what must not outlive the process groups it refers to: empty in a new world."""
    return _world().kept


def name_of(group: dist.ProcessGroup) -> str:
    """What a compiled graph knows of the group: its `group_name`, or what `groups_over` made it of.

    torch numbers groups as they are made. A graph may outlive its program, and in the next the number be another group's, or the
    group not be made yet.
    """
    return _world().names.get(group, group.group_name)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of which that is the `name_of`. Raises RuntimeError for none.

    Communication: as in `group_of`, where `groups_over` would make it.
    """
    if name.startswith(GROUPS):
        made = [group_of(tuple(map(int, ranks.split()))) for ranks in name.removeprefix(GROUPS).split(",")]
        return next(group for group in made if dist.get_rank(group) >= 0)
    own: Any = name  # torch 2.13 has a type of its own for names
    return c10d._resolve_process_group(own)


def this_rank() -> int:
    """This process's rank in the world."""
    return _world().rank


def _world() -> _World:
    global _latest
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() before using DTensors, "
            "or start the program with torchrun"
        )
    if _latest is None or _latest.group is not group:
        _latest = _World(group, dist.get_rank())
    return _latest
