"""Who communicates: the processes of one init_process_group(), or a rank whose collectives are recorded instead of run."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its functions have the world's group as a default: imported later they would keep it
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh

from . import dynamo
from .rendezvous import hear, make_group, tell, told

Positions = Sequence[
    int
]  # of the members of a group along the axes of a mesh, major first; a range where they are in order


class World(Protocol):
    """Ranks that communicate, seen by one of them.

    device_type: where its tensors live, also those without data. by_exchange: whether an all-gather and a reduce-scatter are
    faster as all-to-alls. others_run: whether the other ranks are processes. made, known, kept: meshes by content, and what must not
    outlive the groups that it refers to. axes: of a group, by its name, the axes of the mesh that it was first asked for.
    """

    rank: int
    size: int
    device_type: str
    by_exchange: bool
    others_run: bool
    made: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh]
    known: dict[DeviceMesh, ProcessMesh]
    kept: dict[Any, Any]
    axes: dict[str, tuple[str, ...]]

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        """A new DeviceMesh. Communication: as `group_of` for each axis; none on ranks outside."""

    def group_of(self, part: ProcessMesh) -> dist.ProcessGroup:
        """The group of the ranks of `part`, of which this rank is one. Communication: where it is new, with the others."""

    def group_of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """`group_of` for ranks, ascending, that lie on no mesh."""

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> dist.ProcessGroup:
        """A new group of `ranks`, ascending, for a purpose, which lies along these axes of a mesh. Communication: as `group_of`."""

    def tell(self, what: str, value: bytes) -> None:
        """Has a few bytes known to all ranks under a name. Communication: with the store, no collective."""

    def hear(self, what: str) -> bytes:
        """What another rank has told under that name; waits for it."""

    def told(self, names: Sequence[str]) -> list[bytes | None]:
        """The bytes told under each name so far, or None."""

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        """Where in `part` each member of its group lies."""


class Processes:
    """The processes that one init_process_group() brought together: groups die with their world."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()
        self.device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.by_exchange = dist.get_backend() == "gloo"
        self.others_run = True
        self.made: dict[tuple[ProcessMesh, str, ProcessMesh], DeviceMesh] = {}
        self.known: dict[DeviceMesh, ProcessMesh] = {}
        self.kept: dict[Any, Any] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        self._check(mesh, max(mesh))
        with unset_fake_temporarily():
            ranks = torch.tensor(mesh.ranks, device="cpu").reshape(mesh.shape)
            parts = [mesh.submesh(self.rank, axis) for axis in mesh.axis_names]
            if self.rank in mesh:
                groups = [self.group_of(part) for part in parts if part is not None]
                return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.axis_names)
            made = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names, _init_backend=False)
            made._dim_group_names = []  # as torch has it there
            return made

    def group_of(self, part: ProcessMesh) -> dist.ProcessGroup:
        group = self.group_of_ranks(tuple(sorted(part)))
        self.axes.setdefault(group.group_name, wide_axes(part))
        return group

    def group_of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if len(ranks) == self.size:
            return self.group
        if ranks not in self._groups:
            self._check(f"a group of {ranks}", ranks[-1])
            self._groups[ranks] = make_group(ranks)
        return self._groups[ranks]

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> dist.ProcessGroup:
        group = make_group(ranks, purpose)
        self.axes[group.group_name] = axes
        return group

    def tell(self, what: str, value: bytes) -> None:
        tell(what, value)

    def hear(self, what: str) -> bytes:
        return hear(what)

    def told(self, names: Sequence[str]) -> list[bytes | None]:
        return told(names)

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        position = {
            rank: i for i, rank in enumerate(part)
        }  # torch sorts the ranks of a group, a mesh has them in any order
        found = [position[rank] for rank in dist.get_process_group_ranks(group)]
        return range(len(found)) if found == list(range(len(found))) else found

    def _check(self, what: object, rank: int) -> None:
        if rank >= self.size:
            raise ValueError(
                f"{what} names rank {rank}, but the world has {self.size} processes (0 to {self.size - 1})"
            )


def wide_axes(mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes along which there is more than one rank."""
    return tuple(axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)


_entered: ContextVar[World | None] = ContextVar("entered", default=None)
_latest: Processes | None = None


def world() -> World:
    """The one that was entered, else the processes of torch.distributed. Raises RuntimeError where there are none."""
    return _entered.get() or processes()


@contextmanager
def entered(other: World) -> Iterator[None]:
    """Inside, in this thread, ranks, meshes and groups are those of `other`."""
    token = _entered.set(other)
    try:
        yield
    finally:
        _entered.reset(token)


def processes() -> Processes:
    """Those of torch.distributed. Raises RuntimeError where it is not initialized."""
    global _latest
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() before using DTensors, "
            "or start the program with torchrun"
        )
    if _latest is None or _latest.group is not group:
        dynamo.allow()
        _latest = Processes(group)
    return _latest


@atexit.register
def _forget() -> None:
    """Lets go of the groups while there is an interpreter; what is destroyed then waits for its threads.

    Those of gloo let go of the tensors of the last collective, for which they need the interpreter: a process whose thread comes for
    it too late aborts.
    """
    global _latest
    _latest = None
