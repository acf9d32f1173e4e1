"""Process meshes made into torch's DeviceMeshes, and back; the one place where process groups are created."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.mesh.process_mesh import as_mesh

_world: object = None
_made: dict[tuple[ProcessMesh, str], DeviceMesh] = {}
_known: dict[DeviceMesh, ProcessMesh] = {}
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_of_this_world: dict[Any, Any] = {}


def device_mesh(mesh: ProcessMesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a process mesh, made once for each process group world and found by content afterwards.

    Communication: the first call for a mesh creates its groups, so every rank of the world must make it, in the same
    order. Raises RuntimeError without an initialized process group; ValueError for ranks that the world has not.
    """
    _forget_other_worlds()
    key = (mesh, device_type)
    if key not in _made:
        size = dist.get_world_size()
        if max(mesh.ranks) >= size:
            raise ValueError(
                f"{mesh} names rank {max(mesh.ranks)}, but the world has {size} processes (0 to {size - 1})"
            )
        ranks = torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
        made = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names)
        _made[key] = made
        _known[made] = mesh
    return _made[key]


def process_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The process mesh of a DeviceMesh; axes without names are called axis0, axis1, …"""
    _forget_other_worlds()
    if mesh not in _known:
        with unset_fake_temporarily():  # its ranks are numbers also where torch.compile traces
            _known[mesh] = as_mesh(mesh)
        _made.setdefault((_known[mesh], mesh.device_type), mesh)
    return _known[mesh]


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
    _forget_other_worlds()
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "checked above: torch.distributed is initialized"
        return world
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks))
    return _groups[ranks]


def make_groups(mesh: ProcessMesh, axes: Sequence[str]) -> None:
    """Makes the groups of all sub-meshes along `axes`. Communication: as in `group_of`."""
    for part in mesh.groups(*axes):
        group_of(tuple(sorted(part.ranks)))


def of_this_world() -> dict[Any, Any]:
    """A place for what must not outlive the process groups it refers to: emptied when the world changes."""
    _forget_other_worlds()
    return _of_this_world


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of that `group_name`, which is what a compiled graph knows of it. Raises RuntimeError for none."""
    group: dist.ProcessGroup = c10d._resolve_process_group(
        cast(Any, name)
    )  # torch 2.13 has a type of its own for names
    return group


def this_rank() -> int:
    """This process's rank in the world."""
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() before using DTensors, "
            "or start the program with torchrun"
        )
    return dist.get_rank()


def _forget_other_worlds() -> None:
    """Groups die with the world they were made in; a new one starts with none."""
    global _world
    this_rank()
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _made.clear()
        _known.clear()
        _groups.clear()
        _of_this_world.clear()
