"""Process meshes made into torch's DeviceMeshes, and back, with the groups that they communicate over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.mesh.process_mesh import as_mesh

from .rendezvous import PREFIX
from .worlds import Positions, world

RANKS = "ranks"  # how the name of a group begins that tells its ranks


def device_mesh(mesh: ProcessMesh, device_type: str, permuted: ProcessMesh | None = None) -> DeviceMesh:
    """The DeviceMesh of a process mesh, made once for each process group world and found by content afterwards.

    permuted: the mesh of which this is a permutation, made to say an order of shards; `process_mesh` then gives that one.

    Communication: the first call on a rank of the mesh makes its groups along each axis, in the order of the axes, each as
    in `group_of`. Ranks outside communicate with nobody.
    Raises RuntimeError without an initialized process group; ValueError for ranks that the world has not.
    """
    here, key = world(), (mesh, device_type, mesh if permuted is None else permuted)
    if key not in here.made:
        made = here.device_mesh(mesh, device_type)
        if permuted is not None:
            # Else it equals that of a mesh whose own axes are in this order, and torch's caches would take one for the other.
            made._thread_id = int(permuted.digest[:12], 16)
        here.made[key] = made
        here.known[made] = mesh if permuted is None else permuted
    return here.made[key]


def process_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The process mesh of a DeviceMesh: where it was made to permute one, that one.

    Axes without names are called axis0, axis1, …
    """
    here = world()
    if mesh not in here.known:
        with unset_fake_temporarily():  # its ranks are numbers also where torch.compile traces
            known = here.known[mesh] = as_mesh(mesh)
        here.made.setdefault((known, mesh.device_type, known), mesh)
    return here.known[mesh]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of its axes as `process_mesh` has them, in its own order."""
    return mesh.mesh_dim_names or process_mesh(mesh).axis_names


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group of this rank along `axis`."""
    return mesh.get_group(axis_names(mesh).index(axis))


def group_along(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, Positions]:
    """The group of this rank along `axes`, and the position along them, major first, of each of its members.

    Communication: over several axes as in `group_of`; the groups along one are those of the mesh.
    """
    here, key = world(), ("along", mesh, *axes)
    if key not in here.kept:
        part = process_mesh(mesh).submesh(here.rank, *axes)
        assert part is not None, "ranks outside have no groups"
        group = axis_group(mesh, axes[0]) if len(axes) == 1 else here.group_of(part)
        here.kept[key] = group, here.positions(part, group)
    found: tuple[dist.ProcessGroup, Positions] = here.kept[key]
    return found


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
    return world().group_of_ranks(ranks)


def group_for(purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...] = ()) -> dist.ProcessGroup:
    """A group of `ranks`, ascending, of its own for a purpose: what is sent on it waits for nothing on another.

    axes: of a mesh, along which these ranks lie. Communication: the first call makes the group, as in `group_of`.
    """
    here, key = world(), ("for", purpose, ranks)
    if key not in here.kept:
        here.kept[key] = here.group_for(purpose, ranks, axes)
    group: dist.ProcessGroup = here.kept[key]
    return group


def of_this_world() -> dict[Any, Any]:
    """A place for what must not outlive the process groups it refers to: empty in a new world."""
    return world().kept


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
    return world().rank


def device_type() -> str:
    """Where the tensors of this world live."""
    return world().device_type


def axes_of_group(name: str) -> tuple[str, ...]:
    """The axes of the mesh along which the group of that `group_name` was first asked for here; () for others."""
    return world().axes.get(name, ())
