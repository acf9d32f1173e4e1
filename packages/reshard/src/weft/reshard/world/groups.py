"""The DeviceMeshes and process groups of a ProcessMesh in the current world, and the ProcessMesh of a DeviceMesh.

All groups of Weft are made here. Each function caches by content, so ranks that make the same calls in the same
order share the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.mesh.extension import as_mesh

from .rendezvous import PREFIX
from .world import Positions, world

RANKS = "ranks"  # prefix of a `name_of` that lists the ranks


def device_mesh(mesh: ProcessMesh, device_type: str, permuted: ProcessMesh | None = None) -> DeviceMesh:
    """The DeviceMesh of a process mesh: made once in each world of process groups, found by content afterwards.

    permuted: the mesh before its axes were permuted, where `mesh` is a permutation made to state an order of shards.
        `process_mesh` of the result then returns `permuted`.

    Communication: the first call on a rank of the mesh makes the groups along each axis, axis after axis, each as in
    `group_of`. Ranks outside the mesh communicate with nobody.
    Raises RuntimeError without an initialized process group; ValueError for ranks outside the world.
    """
    here, key = world(), (mesh, device_type, mesh if permuted is None else permuted)
    if key not in here.device_meshes:
        created = here.device_mesh(mesh, device_type)
        if permuted is not None:
            # A DeviceMesh of an unpermuted mesh with this axis order must not be equal: torch's caches compare meshes.
            created._thread_id = int(permuted.digest[:12], 16)
        here.device_meshes[key] = created
        here.process_meshes[created] = mesh if permuted is None else permuted
    return here.device_meshes[key]


def process_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The ProcessMesh of a DeviceMesh; where `device_mesh` was given `permuted`, that mesh.

    Axes without names are called axis0, axis1, …
    """
    here = world()
    if mesh not in here.process_meshes:
        with unset_fake_temporarily():  # reads ranks as numbers, also while torch.compile traces
            known = here.process_meshes[mesh] = as_mesh(mesh)
        here.device_meshes.setdefault((known, mesh.device_type, known), mesh)
    return here.process_meshes[mesh]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The axis names of a DeviceMesh, in the DeviceMesh's order; axes without names are named as in `process_mesh`."""
    return mesh.mesh_dim_names or process_mesh(mesh).axis_names


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group of this rank along an axis."""
    return mesh.get_group(axis_names(mesh).index(axis))


def group_along(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, Positions]:
    """The group of this rank along `axes`, and the position along `axes`, major first, of each member.

    Communication: along several axes as `group_of`; along a single axis none, as the DeviceMesh has the group.
    """
    here, key = world(), ("along", mesh, *axes)
    if key not in here.cache:
        part = process_mesh(mesh).submesh(here.rank, *axes)
        assert part is not None, "ranks outside the mesh have no groups"
        group = axis_group(mesh, axes[0]) if len(axes) == 1 else here.group_of(part)
        here.cache[key] = group, here.positions(part, group)
    found: tuple[dist.ProcessGroup, Positions] = here.cache[key]
    return found


def group_over(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """The group of this rank along `axes`, in whichever order they are given. Communication: as `group_along`."""
    whole = process_mesh(mesh)
    wide = [axis for axis in axes if whole.axis_size(axis) > 1] or [axes[0]]
    return group_along(mesh, wide)[0]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `ranks`, ascending, including this rank; made once in each world of process groups.

    Communication: the first call makes the group and waits for the other members; see `make_group`. Ranks outside the
    group need not call. Raises ValueError for ranks outside the world.
    """
    return world().group_of_ranks(ranks)


def group_for(purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...] = ()) -> dist.ProcessGroup:
    """A separate process group of `ranks`, ascending, for a purpose.

    Collectives on this group do not wait for collectives on another group of the same ranks.
    axes: the mesh axes along which the ranks lie. Communication: the first call makes the group, as `group_of`.
    """
    here, key = world(), ("for", purpose, ranks)
    if key not in here.cache:
        here.cache[key] = here.group_for(purpose, ranks, axes)
    group: dist.ProcessGroup = here.cache[key]
    return group


def world_cache() -> dict[Any, Any]:
    """A cache for values that refer to process groups; a new world starts with an empty cache."""
    return world().cache


def name_of(group: dist.ProcessGroup) -> str:
    """A name under which a compiled graph can store the group: its ranks for a group made here, else its `group_name`.

    torch numbers other groups in order of creation. A later program may load the graph before it has made the group.
    """
    if group.group_name.startswith(PREFIX):
        return f"{RANKS} {' '.join(map(str, dist.get_process_group_ranks(group)))}"
    return group.group_name


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with this `name_of`. Raises RuntimeError where there is none.

    Communication: for a group made here, as `group_of`.
    """
    if name.startswith(RANKS):
        return group_of(tuple(map(int, name.removeprefix(RANKS).split())))
    own: Any = name  # torch 2.13 has a separate type for group names
    return c10d._resolve_process_group(own)


def this_rank() -> int:
    """This process's rank in the world."""
    return world().rank


def device_type() -> str:
    """The device type of this world's tensors."""
    return world().device_type


def axes_of_group(name: str) -> tuple[str, ...]:
    """The mesh axes for which the group with this `group_name` was first asked for here; () for other groups."""
    return world().axes.get(name, ())


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as words in a message: "rank 3", "ranks 0, 1, 4-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
