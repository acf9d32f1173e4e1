"""The ranks which communicate: the processes of init_process_group(), or a rank whose collectives are only recorded.

`World` is the interface. `Processes` implements `World` over torch.distributed, recording.py for recorded
collectives. Code asks `world()`, mostly through groups.py, for this process's rank, a mesh or a group.

The members alone make a group, under a name derived from the ranks. torch.distributed.new_group() must be called by the
whole world, and names groups by a counter. Ranks with different parts of a model make different groups. Two groups may
get the same counter, and hence the same name; members of the two groups then connect by mistake. With
use_local_synchronization only the members call, but names still come from the counter. Here groups are made as in
new_group(), but are named by a digest of the ranks: different groups have different names and cannot connect.

NCCL: where init_process_group() was given a device_id, torch would split the world's communicator, and a split needs a
call on every rank of the world. Here the members create a separate communicator at once; without a device_id, NCCL
creates the communicator in the first collective. Ranks outside the group are never called.

The same store carries small messages between ranks: `publish`, `published`, `wait_for_message`, `meet`.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Imported before init_process_group(): the default arguments of these functions would otherwise hold the world's group.
import torch.distributed.nn.functional
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
    _world,
)
from weft.mesh import ProcessMesh

from . import dynamo

PREFIX = "weft-"  # of the names of these groups
_MEMBER_BITS = 32  # low bits of the store's counter in `meet`, which count ranks; the high bits sum their numbers
REMEDY = (
    "all ranks of a group must make it: use the meshes that ranks share in the same order on all of these ranks, or "
    "allow more time with init_process_group(timeout=...)"
)


def make_group(ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup:
    """Makes a process group of `ranks`, ascending, including this rank, on the backend of the world.

    purpose: distinguishes several groups of the same ranks.
    Communication: waits for all members through the world's store, up to the timeout given to
    init_process_group().
    Raises RuntimeError where members do not come in time, for example because members list different ranks. The
    message says which members are missing, and which groups they make instead.
    """
    default, rank = dist.group.WORLD, dist.get_rank()
    assert default is not None, "the world exists, as `Processes` does"
    text = f"ranks {', '.join(map(str, ranks))} on {dist.get_backend()}" + (f" for {purpose}" if purpose else "")
    name = PREFIX + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    store = _get_default_store()
    members = _Members(PrefixStore("weft", store), name, text, ranks, rank)
    members.meet("to make")
    with _unbound(default) as device, unset_fake_temporarily():
        group: dist.ProcessGroup
        group, _ = _new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            dist.get_backend(),
            store,
            name,  # type: ignore[arg-type]  # torch 2.13 has a separate type for group names
            timeout=_get_default_timeout(dist.get_backend()),
            device_id=device,
            group_desc="weft",
        )
    _world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    members.meet("to use")  # a rank that exits before all are connected would make the other members fail
    return group


def publish(name: str, value: bytes) -> None:
    """Publishes a few bytes to all ranks under a name.

    Communication: a request to the world's store. A TCPStore sends no answer, and the rank does not wait.
    """
    PrefixStore("weft", _get_default_store()).set(f"published/{name}", value.hex())


def published(names: Sequence[str]) -> list[bytes | None]:
    """The bytes published so far under each name; None for a name without bytes.

    Communication: two requests to the world's store if every name has bytes. Otherwise a request for all names, one for
    each name, and one more for each name with bytes.
    """
    store = PrefixStore("weft", _get_default_store())
    keys = [f"published/{name}" for name in names]
    if not store.check(keys):
        return [bytes.fromhex(store.get(key).decode()) if store.check([key]) else None for key in keys]
    several = store.has_extended_api()  # type: ignore[attr-defined]  # False for a FileStore
    values = store.multi_get(keys) if several else [store.get(key) for key in keys]
    return [bytes.fromhex(value.decode()) for value in values]


def patience() -> float:
    """The timeout of the world's store, in seconds: the longest wait for a message of another rank."""
    seconds: float = _get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    return seconds


def wait_for_message(name: str, seconds: float | None = None) -> bytes:
    """Waits until another rank publishes bytes under this name, and returns the bytes.

    seconds: None for the store's timeout.
    Communication: with the world's store. Raises RuntimeError after that time.
    """
    store, key = PrefixStore("weft", _get_default_store()), f"published/{name}"
    seconds = patience() if seconds is None else seconds
    try:
        store.wait([key], timedelta(seconds=seconds))
        return bytes.fromhex(store.get(key).decode())
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} timed out after {seconds:g} s, waiting for the message {name!r} of another rank, "
            f"which has failed or runs another program; see the other ranks' output"
        ) from error


def meet(name: str, round: int, members: int, number: int, seconds: float | None = None) -> int:
    """Waits until as many ranks as `members` have called this for the same round, and returns the sum of their numbers.

    Hosts wait for hosts; no device waits. A rank calls the rounds of a name in turn, from 0.
    number: 0 to 2**20. seconds: as for `wait_for_message`.
    Communication: two or three requests to the world's store. Raises RuntimeError after `seconds`.
    """
    store = PrefixStore("weft", _get_default_store())
    total = store.add(f"met/{name}/{round}", (number << _MEMBER_BITS) + 1)
    if total % (1 << _MEMBER_BITS) < members:
        return int(wait_for_message(f"{name}/{round}", seconds))
    publish(f"{name}/{round}", b"%d" % (total >> _MEMBER_BITS))
    if round:  # every member has read the sum of the round before
        store.delete_key(f"met/{name}/{round - 1}")
        store.delete_key(f"published/{name}/{round - 1}")
    return int(total >> _MEMBER_BITS)


@contextmanager
def _unbound(default: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """The device of the world's communicator. Inside, the world counts as unbound, so torch splits nothing."""
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device


class _Members:
    """The members of a new group, which meet in the store. Made by `make_group` on each member.

    name: the group's name, a digest of `text`. text: the ranks, the backend and the purpose, for messages.
    Keys in the store, where r is a rank and `at` is name/step, with the step given to `meet`:
    making/r: the group which rank r is making.
    name/ranks: the text of the first member. A member finds a different text only if two texts have the same digest.
    at/r: rank r has come. at/count: number of ranks which have come. at/all: all have come.
    """

    def __init__(self, store: Store, name: str, text: str, ranks: Sequence[int], rank: int) -> None:
        self._store, self._name, self._text, self._ranks, self._rank = store, name, text, ranks, rank

    def meet(self, step: str) -> None:
        """Waits until all members have called this with the same step: "to make" the group, then "to use" it."""
        store, at = self._store, f"{self._name}/{step}"
        first_text = store.compare_set(f"{self._name}/ranks", "", self._text).decode()
        if first_text != self._text:
            raise RuntimeError(
                f"rank {self._rank} makes a group of {self._text}, and another rank made a group of {first_text} by "
                f"the same name; give one of the groups another purpose"
            )
        store.set(f"making/{self._rank}", self._text)
        store.set(f"{at}/{self._rank}", "")
        if store.add(f"{at}/count", 1) == len(self._ranks):
            store.set(f"{at}/all", "")
        try:
            store.wait([f"{at}/all"])
        except dist.DistError as error:
            seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
            missing = [rank for rank in self._ranks if not store.check([f"{at}/{rank}"])]
            raise RuntimeError(
                f"rank {self._rank} waited {seconds:g} s for the others {step} a group of "
                f"{self._text}. {'. '.join(map(self._whereabouts, missing))}. {REMEDY}"
            ) from error
        store.delete_key(f"making/{self._rank}")

    def _whereabouts(self, rank: int) -> str:
        key = f"making/{rank}"
        if not self._store.check([key]):
            return f"Rank {rank} did not come, and makes no other group"
        return f"Rank {rank} makes one of {self._store.get(key).decode()}"


# For each member of a group, in the order of the group's ranks: its index along some mesh axes, row-major. A range
# where the two orders are the same.
Positions = Sequence[int]


def members_by_position(positions: Positions) -> list[int]:
    """The members, as numbers in the order of the group's ranks, sorted by position."""
    return sorted(range(len(positions)), key=positions.__getitem__)


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
    process_meshes: dict[DeviceMesh, ProcessMesh]  # of a permuted mesh, the mesh before the permutation
    cache: dict[Any, Any]  # see `groups.world_cache`
    axes: dict[str, tuple[str, ...]]  # by group name, the mesh axes of the group's first use

    def device_mesh(self, mesh: ProcessMesh, device_type: str) -> DeviceMesh:
        """A new DeviceMesh of `mesh`. Communication: `group_of` along each axis; none on ranks outside the mesh."""

    def group_of(self, part: ProcessMesh) -> dist.ProcessGroup:
        """The process group of the ranks of `part`, which include this rank.

        Communication: with the ranks of `part` where the group is new.
        """

    def group_of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """`group_of` for ranks, ascending, which need not be a part of a mesh."""

    def group_for(self, purpose: str, ranks: tuple[int, ...], axes: tuple[str, ...]) -> dist.ProcessGroup:
        """A new group of `ranks`, ascending, for a purpose, such as the messages between two pipeline stages.

        Collectives on this group do not wait for collectives on further groups of these ranks.
        axes: the mesh axes along which the ranks differ. Communication: as `group_of`.
        """

    def publish(self, name: str, value: bytes) -> None:
        """Publishes a few bytes to all ranks under a name. Communication: with the store; no collective."""

    def wait_for_message(self, name: str, seconds: float | None = None) -> bytes:
        """Waits until another rank publishes bytes under this name, and returns the bytes.

        seconds: to wait at most; None: `patience()`. Raises RuntimeError after this time.
        """

    def published(self, names: Sequence[str]) -> list[bytes | None]:
        """The bytes published so far under each name; None for a name without bytes."""

    def meet(self, name: str, round: int, members: int, number: int, seconds: float | None = None) -> int:
        """Waits for the hosts of `members` ranks, and returns the sum of their numbers.

        Called at the end of a pipeline's step, to count the failed ranks. A message published under "NAME/ROUND" ends
        the wait early, and is returned in place of the sum.
        name: of the pipeline. round: the number of earlier meetings. seconds: as for `wait_for_message`.
        """

    def positions(self, part: ProcessMesh, group: dist.ProcessGroup) -> Positions:
        """The position in `part` of each member of `group`, in the order of the group's ranks."""


class Processes:
    """The World of the processes joined by an init_process_group(); made by `processes()`.

    The next init_process_group() gets a new instance, so no group outlives the world.
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

    def wait_for_message(self, name: str, seconds: float | None = None) -> bytes:
        return wait_for_message(name, seconds)

    def meet(self, name: str, round: int, members: int, number: int, seconds: float | None = None) -> int:
        return meet(name, round, members, number, seconds)

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
                f"{subject} names rank {rank}, but the world has {self.size} processes (0 to {self.size - 1}); "
                f"start as many processes as the mesh has ranks (torchrun --nproc-per-node), or name a smaller mesh"
            )


def nontrivial_axes(mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes of a mesh with two ranks or more."""
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
