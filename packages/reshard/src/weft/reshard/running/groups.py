"""Process meshes made into torch's DeviceMeshes, and back, with the groups that they communicate over."""

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

from . import dynamo
from .rendezvous import PREFIX, make_group

RANKS = "ranks"  # how the name of a group begins that tells its ranks


@dataclass(frozen=True, slots=True)
class _World:
    """What was made among the processes that one init_process_group() brought together: groups die with their world."""

    group: dist.ProcessGroup
    rank: int  # kept: every op on a DTensor asks for it
    made: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh] = field(default_factory=dict)
    known: dict[DeviceMesh, ProcessMesh] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)


_latest: _World | None = None


def device_mesh(mesh: ProcessMesh, device_type: str, permuted: ProcessMesh | None = None) -> DeviceMesh:
    """The DeviceMesh of a process mesh, made once for each process group world and found by content afterwards.

    permuted: the mesh of which this is a permutation, made to say an order of shards; `process_mesh` then gives that one.

    Communication: the first call on a rank of the mesh makes its groups along each axis, in the order of the axes, each as
    in `group_of`. Ranks outside communicate with nobody.
    Raises RuntimeError without an initialized process group; ValueError for ranks that the world has not.
    """
    world, key = _world(), (mesh, device_type, mesh if permuted is None else permuted)
    if key not in world.made:
        _check_in_world(mesh, max(mesh))
        with unset_fake_temporarily():
            ranks = torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
            if world.rank in mesh:
                groups = [group_of(_sorted(_along(mesh, axis))) for axis in mesh.axis_names]
                made = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.axis_names)
            else:
                made = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names, _init_backend=False)
                made._dim_group_names = []  # as torch has it there
        if permuted is not None:
            # Else it equals that of a mesh whose own axes are in this order, and torch's caches would take one for the other.
            made._thread_id = int(permuted.digest[:12], 16)
        world.made[key] = made
        world.known[made] = mesh if permuted is None else permuted
    return world.made[key]


def process_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The process mesh of a DeviceMesh: where it was made to permute one, that one.

    Axes without names are called axis0, axis1, …
    """
    world = _world()
    if mesh not in world.known:
        with unset_fake_temporarily():  # its ranks are numbers also where torch.compile traces
            known = world.known[mesh] = as_mesh(mesh)
        world.made.setdefault((known, mesh.device_type, known), mesh)
    return world.known[mesh]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of its axes as `process_mesh` has them, in its own order."""
    return mesh.mesh_dim_names or process_mesh(mesh).axis_names


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group of this rank along `axis`."""
    return mesh.get_group(axis_names(mesh).index(axis))


def group_along(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, list[int]]:
    """The group of this rank along `axes`, and the position along them, major first, of each of its members.

    torch sorts the ranks of a group; a mesh may list them in any order.
    Communication: over several axes as in `group_of`; the groups along one are those of the mesh.
    """
    part = _along(process_mesh(mesh), *axes)
    group = axis_group(mesh, axes[0]) if len(axes) == 1 else group_of(_sorted(part))
    position = {rank: i for i, rank in enumerate(part)}
    return group, [position[rank] for rank in dist.get_process_group_ranks(group)]


def group_over(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """The group of this rank along `axes`, whatever their order. Communication: as in `group_along`."""
    whole = process_mesh(mesh)
    wide = [axis for axis in axes if whole.axis_size(axis) > 1] or [axes[0]]
    return group_along(mesh, wide)[0]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `ranks`, ascending, of which this rank is one; made once for each process group world.

    Communication: the first call makes the group, and waits for the other members; see `make_group`. Ranks outside have
    nothing to do. Raises ValueError for ranks that the world has not.
    """
    world = _world()
    if len(ranks) == dist.get_world_size():
        return world.group
    if ranks not in world.groups:
        _check_in_world(f"a group of {ranks}", ranks[-1])
        world.groups[ranks] = make_group(ranks)
    return world.groups[ranks]


def of_this_world() -> dict[Any, Any]:
    """A place for what must not outlive the process groups it refers to: empty in a new world."""
    return _world().kept


def name_of(group: dist.ProcessGroup) -> str:
    """What a compiled graph knows of the group: its ranks where it was made here, else its `group_name`.

    torch numbers the others as they are made. A graph may outlive its program, and in the next the group not be made yet.
    """
    if group.group_name.startswith(PREFIX):
        return f"{RANKS} {' '.join(map(str, dist.get_process_group_ranks(group)))}"
    return group.group_name


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of which that is the `name_of`. Raises RuntimeError for none.

    Communication: of a group made here, as in `group_of`.
    """
    if name.startswith(RANKS):
        return group_of(tuple(map(int, name.removeprefix(RANKS).split())))
    own: Any = name  # torch 2.13 has a type of its own for names
    return c10d._resolve_process_group(own)


def this_rank() -> int:
    """This process's rank in the world."""
    return _world().rank


def _check_in_world(what: object, rank: int) -> None:
    if rank >= (size := dist.get_world_size()):
        raise ValueError(f"{what} names rank {rank}, but the world has {size} processes (0 to {size - 1})")


def _along(mesh: ProcessMesh, *axes: str) -> ProcessMesh:
    part = mesh.submesh(this_rank(), *axes)
    assert part is not None, "ranks outside have no groups"
    return part


def _sorted(mesh: ProcessMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh))


def _world() -> _World:
    global _latest
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() before using DTensors, "
            "or start the program with torchrun"
        )
    if _latest is None or _latest.group is not group:
        dynamo.allow()
        _latest = _World(group, dist.get_rank())
    return _latest
