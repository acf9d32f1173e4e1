"""The DeviceMeshes and process groups of a ProcessMesh in the current world, and the ProcessMesh of a DeviceMesh.

All groups of Weft are made here. Each function caches by content, so ranks which make the same calls in the same
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

from .folded import FoldedGroup, FoldedMesh
from .world import PREFIX, Positions, nontrivial_axes, world

RANKS = "ranks"  # the first word of a group's name in a graph, where the name lists the group's ranks


def device_mesh(mesh: ProcessMesh, device_type: str, unpermuted: ProcessMesh | None = None) -> DeviceMesh:
    """The DeviceMesh of a process mesh: made once in each world of process groups, found by content afterwards.

    unpermuted: the mesh before, where the caller has permuted the axes of a mesh: in a DTensor earlier axes are major,
        so permuted axes state a different order of shards. `process_mesh` of the result returns `unpermuted`. None:
        the axes are not permuted.

    Communication: the first call on a rank of the mesh makes the groups along each axis, axis after axis, each as in
    `group_of`. Ranks outside the mesh communicate with nobody.
    Raises RuntimeError without an initialized process group; ValueError for ranks outside the world.
    """
    current, original = world(), mesh if unpermuted is None else unpermuted
    key = mesh, device_type, original
    if key not in current.device_meshes:
        created = current.device_mesh(mesh, device_type)
        if unpermuted is not None:
            # A program may also make a mesh equal to this permuted one. Both DeviceMeshes would be equal, and torch's
            # caches would mix them up. DeviceMesh also compares `_thread_id`.
            created._thread_id = int(unpermuted.digest[:12], 16)
        current.device_meshes[key] = created
        current.process_meshes[created] = original
    return current.device_meshes[key]


def process_mesh(mesh: DeviceMesh) -> ProcessMesh:
    """The ProcessMesh of a DeviceMesh; of a permutation made by `device_mesh`, the unpermuted mesh.

    Axes without names are called axis0, axis1, …
    """
    current = world()
    if mesh not in current.process_meshes:
        with unset_fake_temporarily():  # reads ranks as numbers, also while torch.compile traces
            converted = current.process_meshes[mesh] = as_mesh(mesh)
        current.device_meshes.setdefault((converted, mesh.device_type, converted), mesh)
    return current.process_meshes[mesh]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The axis names of a DeviceMesh, in the DeviceMesh's order; axes without names are named as in `process_mesh`."""
    return mesh.mesh_dim_names or process_mesh(mesh).axis_names


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The process group of this rank along an axis."""
    return mesh.get_group(axis_names(mesh).index(axis))


def group_along(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, Positions]:
    """This rank's group along `axes`, and the members' positions.

    positions[i] is the index of the group's i-th rank along `axes`, row-major: with axes of sizes 2 and 3, the rank at
    (1, 0) has position 3.
    Communication: along several axes as `group_of`; along a single axis none, as the DeviceMesh has the group.
    """
    current, key = world(), ("along", mesh, *axes)
    if key not in current.cache:
        part = process_mesh(mesh).submesh(current.rank, *axes)
        assert part is not None, "ranks outside the mesh have no groups"
        group = axis_group(mesh, axes[0]) if len(axes) == 1 else current.group_of(part)
        current.cache[key] = group, current.positions(part, group)
        if ("used", group.group_name) not in current.cache:  # until now named by the mesh for which it was made
            current.cache["used", group.group_name] = True
            current.axes[group.group_name] = nontrivial_axes(part)
    group_and_positions: tuple[dist.ProcessGroup, Positions] = current.cache[key]
    return group_and_positions


def group_over(mesh: DeviceMesh | FoldedMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group along `axes`, for collectives to which the members' order makes no difference.

    Any order of `axes` gives a group of the same ranks, because a group lists ranks in ascending order. Axes of
    size 1 are left out: a single remaining axis then needs no new group. Communication: as `group_along`.
    On a FoldedMesh, a group along a folded axis is a FoldedGroup.
    """
    if isinstance(mesh, FoldedMesh):
        folded: Any = _folded_group(mesh, axes)  # its collectives are called as those of any group
        group: dist.ProcessGroup = folded
        return group
    process = process_mesh(mesh)
    nontrivial = [axis for axis in axes if process.axis_size(axis) > 1] or [axes[0]]
    return group_along(mesh, nontrivial)[0]


def _folded_group(mesh: FoldedMesh, axes: Sequence[str]) -> dist.ProcessGroup | FoldedGroup:
    """`group_over` on a FoldedMesh."""
    process = process_mesh(mesh.mesh)
    if not any(mesh.fold.fold(axis) > 1 for axis in axes):
        return group_over(mesh.mesh, axes)
    in_order = tuple(axis for axis in process.axis_names if axis in axes)
    nontrivial = [axis for axis in in_order if process.axis_size(axis) > 1]
    return mesh.group(group_along(mesh.mesh, nontrivial) if nontrivial else None, in_order)


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `ranks`, ascending, including this rank; made once in each world of process groups.

    Communication: the first call makes the group and waits for all members; see `make_group`. Ranks outside the
    group need not call. Raises ValueError for ranks outside the world.
    """
    return world().group_of_ranks(ranks)


def group_for(purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...] = ()) -> dist.ProcessGroup:
    """A process group of `ranks`, ascending, used for a single purpose, such as messages between pipeline stages.

    Collectives and messages on this group do not wait for another group of the same ranks.
    purpose: any text; each text has a separate group. axes: the mesh axes along which the ranks differ.
    Communication: the first call makes the group, as `group_of`.
    """
    current, key = world(), ("for", purpose, ranks)
    if key not in current.cache:
        current.cache[key] = current.group_for(purpose, ranks, axes)
    group: dist.ProcessGroup = current.cache[key]
    return group


def world_cache() -> dict[Any, Any]:
    """A cache for values which refer to process groups; a new world starts with an empty cache."""
    return world().cache


def graph_name_of(group: dist.ProcessGroup) -> str:
    """The name of a group in a compiled graph; `group_named` returns the group.

    torch keeps graphs on disk, and a later program may load a graph before making the group. Therefore the name of
    a group made here lists the group's ranks, from which the program makes the group. For torch's own groups the name
    is the `group_name`, a number in the order of creation.
    """
    if group.group_name.startswith(PREFIX):
        return f"{RANKS} {' '.join(map(str, dist.get_process_group_ranks(group)))}"
    return group.group_name


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with this `graph_name_of` or torch's `group_name`. Raises RuntimeError where there is none.

    Communication: for a name which lists ranks, as `group_of`.
    """
    if name.startswith(RANKS):
        return group_of(tuple(map(int, name.removeprefix(RANKS).split())))
    torch_name: Any = name  # torch 2.13 has a separate type for group names
    return c10d._resolve_process_group(torch_name)


def this_rank() -> int:
    """This process's rank in the world."""
    return world().rank


def device_type() -> str:
    """The device type of this world's tensors, as "cuda"."""
    return world().device_type


def axes_of_group(group_name: str) -> tuple[str, ...]:
    """The mesh axes of a group, by torch's `group_name`, for counting a collective's bytes by axis.

    Several sets of axes may have the same group; the axes are those of the group's first use. () for a group made
    elsewhere.
    """
    return world().axes.get(group_name, ())


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
