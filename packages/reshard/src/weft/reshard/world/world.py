"""The ranks that communicate: the processes of init_process_group(), or one rank whose collectives are only recorded.

`World` is the interface. `Processes` implements `World` over torch.distributed, recording.py for recorded
collectives. Code asks `world()`, mostly through groups.py, for this process's rank, a mesh or a group.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Imported before init_process_group(): the default arguments of these functions would otherwise hold the world's group.
import torch.distributed.nn.functional
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh

from . import dynamo
from .rendezvous import make_group, publish, published, wait_for_message

# For each member of a group, in the order of the group's ranks: its index along some mesh axes, row-major. A range
# where the two orders are the same.
Positions = Sequence[int]


class World(Protocol):
    """The communicating ranks, as this rank sees them. `world()` returns the current World.

    A World also holds caches, because their entries refer to process groups and must end with these groups.
    """

    rank: int  # this process's
    size: int  # number of ranks
    device_type: str  # of the tensors, also of tensors without data
    prefers_all_to_all: bool  # whether all-to-alls are faster than the backend's own all-gather and reduce-scatter
    peers_run: bool  # whether the other ranks are running processes
    # By mesh, device type, and the mesh before a permutation of the axes; see `groups.device_mesh`.
    device_meshes: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh]
    process_meshes: dict[DeviceMesh, ProcessMesh]
    cache: dict[Any, Any]  # see `groups.world_cache`
    axes: dict[str, tuple[str, ...]]  # by group name, the mesh axes for which the group was first asked for

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        """A new DeviceMesh of `mesh`. Communication: `group_of` along each axis; none on ranks outside the mesh."""

    def group_of(self, part: ProcessMesh) -> dist.ProcessGroup:
        """The process group of the ranks of `part`, which include this rank.

        Communication: with the other ranks of `part` where the group is new.
        """

    def group_of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """`group_of` for ranks, ascending, that need not be a part of a mesh."""

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> dist.ProcessGroup:
        """A new group of `ranks`, ascending, for a purpose, such as the messages between two pipeline stages.

        Collectives on this group do not wait for collectives on other groups of these ranks.
        axes: the mesh axes along which the ranks differ. Communication: as `group_of`.
        """

    def publish(self, name: str, value: bytes) -> None:
        """Publishes a few bytes to all ranks under a name. Communication: with the store; no collective."""

    def wait_for_message(self, name: str) -> bytes:
        """Waits until another rank publishes bytes under this name, and returns the bytes."""

    def published(self, names: Sequence[str]) -> list[bytes | None]:
        """The bytes published so far under each name; None for a name without bytes."""

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        """The position in `part` of each member of `group`, in the order of the group's ranks."""


class Processes:
    """The World of the processes joined by an init_process_group(); made by `processes()`.

    The next init_process_group() gets a new instance, so no group outlives its world.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()
        self.device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.prefers_all_to_all = dist.get_backend() == "gloo"
        self.peers_run = True
        self.device_meshes: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh] = {}
        self.process_meshes: dict[DeviceMesh, ProcessMesh] = {}
        self.cache: dict[Any, Any] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        self._check_rank(mesh, max(mesh))
        with unset_fake_temporarily():
            ranks = torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
            parts = [mesh.submesh(self.rank, axis) for axis in mesh.axis_names]
            if self.rank in mesh:
                groups = [self.group_of(part) for part in parts if part is not None]
                return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.axis_names)
            result = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names, _init_backend=False)
            result._dim_group_names = []  # torch's own value on ranks outside a mesh
            return result

    def group_of(self, part: ProcessMesh) -> dist.ProcessGroup:
        group = self.group_of_ranks(tuple(sorted(part)))
        self.axes.setdefault(group.group_name, nontrivial_axes(part))
        return group

    def group_of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if len(ranks) == self.size:
            return self.group
        if ranks not in self._groups:
            self._check_rank(f"a group of {ranks}", ranks[-1])
            self._groups[ranks] = make_group(ranks)
        return self._groups[ranks]

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> dist.ProcessGroup:
        group = make_group(ranks, purpose)
        self.axes[group.group_name] = axes
        return group

    def publish(self, name: str, value: bytes) -> None:
        publish(name, value)

    def wait_for_message(self, name: str) -> bytes:
        return wait_for_message(name)

    def published(self, names: Sequence[str]) -> list[bytes | None]:
        return published(names)

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        # torch sorts a group's ranks; a mesh has them in any order.
        position = {rank: i for i, rank in enumerate(part)}
        positions = [position[rank] for rank in dist.get_process_group_ranks(group)]
        return range(len(positions)) if positions == list(range(len(positions))) else positions

    def _check_rank(self, subject: object, rank: int) -> None:
        if rank >= self.size:
            raise ValueError(
                f"{subject} names rank {rank}, but the world has {self.size} processes (0 to {self.size - 1})"
            )


def nontrivial_axes(mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes of a mesh with more than one rank."""
    return tuple(axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)


_current_world: ContextVar[World | None] = ContextVar("entered", default=None)
_latest_processes: Processes | None = None


def world() -> World:
    """The World entered last by `enter_world`, else `processes()`. Raises RuntimeError without either."""
    return _current_world.get() or processes()


@contextmanager
def enter_world(inner: World) -> Iterator[None]:
    """Makes `inner` the current World, in this thread, until the block ends."""
    token = _current_world.set(inner)
    try:
        yield
    finally:
        _current_world.reset(token)


def processes() -> Processes:
    """The World of torch.distributed's processes. Raises RuntimeError where torch.distributed is not initialized."""
    global _latest_processes
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() before using DTensors, "
            "or start the program with torchrun"
        )
    if _latest_processes is None or _latest_processes.group is not group:
        dynamo.allow()
        _latest_processes = Processes(group)
    return _latest_processes


@atexit.register
def _forget() -> None:
    """Drops the process groups at exit, while the interpreter still runs.

    Destroying a gloo group waits for the group's threads, which need the interpreter to release the tensors of the last
    collective. A thread that asks for the interpreter too late aborts the process.
    """
    global _latest_processes
    _latest_processes = None
