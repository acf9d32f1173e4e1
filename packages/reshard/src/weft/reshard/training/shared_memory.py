"""Sums over the processes of a machine in shared memory; sockets would copy each byte into the kernel and out again.

Each member of the group writes a tensor into the member's area of the memory. Once all have written, each member adds
all tensors up: each byte is written once, and read once by each member. An all-reduce of a number on the same group
tells the members when all have written. The wait for a dead member then ends as in any collective. For small groups
only: a member reads as many tensors as there are members.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..moving.collectives import Running, adds_in_tree, all_reduce, all_reduce_bytes, uses_all_to_all
from ..moving.tree import Members
from ..world.collective_bytes import count_as
from ..world.groups import world_cache
from ..world.world import world

# Sizes of a member's tensor for which memory is shared; below, sockets are as fast.
_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 25
_MOST_MEMBERS = 4  # the largest group
# Areas of each member, used in turn. A member may write for the next sum while members still read for the last sum.
# Once all have written for the next sum, all have read for the last.
_AREAS = 2


def sum_parts(parts: list[Tensor], group: dist.ProcessGroup, members: Members) -> Running:
    """The sum over the group's members of `parts`, concatenated into a flat tensor. A generator: see `Running`.

    parts: of the same dtype, with equally many elements in all on every member. The list is emptied, to free the
        tensors.
    members: the group's members as addends. Inside `exact_sums`, more than two add in the tree.
    The result is the same to the bit on every member.
    Communication: an all-reduce. Members with shared memory reduce a single number, which counts as the whole tensor.
    """
    memory = _memory_for(parts, group)
    flat_parts = [part.reshape(-1) for part in parts]
    parts.clear()
    if memory is None:
        flat = torch.cat(flat_parts)
        flat_parts.clear()
        return (yield from all_reduce(flat, "sum", group, members))
    elements = sum(map(len, flat_parts))
    areas = memory.acquire(elements, flat_parts[0].dtype)
    torch.cat(flat_parts, out=areas[group.rank()])
    flat_parts.clear()
    nbytes = all_reduce_bytes("sum", elements, areas.itemsize, group.size())
    with count_as("all-reduce", nbytes):
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None, "async_op=True returns the work"
    yield work
    if adds_in_tree("sum", len(areas)):
        flat = members.reduce("sum", areas)
    else:
        flat = torch.add(*areas) if len(areas) == 2 else areas.sum(0, dtype=areas.dtype)
    memory.release()
    return flat


class _Memory:
    """Memory shared by the members of a group: `_AREAS` areas of `nbytes` bytes for each member.

    A single sum uses the memory at a time, from `acquire` to `release`. A sum that nobody waits for never releases the
    memory: members may still read.
    """

    def __init__(self, shared: Tensor, members: int, nbytes: int) -> None:
        self.shared, self.nbytes = shared.view(_AREAS, members, nbytes), nbytes
        self.in_use, self._turn = False, 0

    def acquire(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Each member's area for the next sum, [members, elements] of `dtype`: another area than for the last sum."""
        self.in_use, self._turn = True, (self._turn + 1) % _AREAS
        return self.shared[self._turn, :, : elements * dtype.itemsize].view(dtype)

    def release(self) -> None:
        self.in_use = False


def _memory_for(parts: Sequence[Tensor], group: dist.ProcessGroup) -> _Memory | None:
    """The group's shared memory, with room for `parts`; None where there is none, or while in use by a sum.

    All members get the same answer, since sums start and end in the same order on all members. The memory lives as long
    as the group.
    Communication: with the store, where the present memory is too small.
    """
    first, nbytes = parts[0], sum(part.nbytes for part in parts)
    if not (first.is_cpu and first.is_floating_point() and _LEAST_BYTES <= nbytes <= _MOST_BYTES):
        return None
    if not 2 <= group.size() <= _MOST_MEMBERS:
        return None
    if not uses_all_to_all() or not hasattr(os, "memfd_create"):  # on Linux alone
        return None
    memories: dict[str, _Memory | None] = world_cache().setdefault("shared memory", {})
    memory = memories.get(group.group_name)
    if group.group_name not in memories or (memory is not None and memory.nbytes < nbytes and not memory.in_use):
        memories[group.group_name] = memory = _allocate_together(nbytes, group)
    return memory if memory is not None and memory.nbytes >= nbytes and not memory.in_use else None


@dataclass(frozen=True, slots=True)
class _Offer:
    """The first member's message to the rest of the group: where the new memory is."""

    machine: str  # `_machine()` of the first member
    path: str
    token: str  # at the start of the memory, to recognize the memory

    def map(self, nbytes: int) -> mmap.mmap:
        """Maps the memory into this process, on the first member too. Raises OSError or ValueError if impossible."""
        if self.machine != _machine():
            raise OSError("the memory is on another machine")
        file = os.open(self.path, os.O_RDWR)
        try:
            mapped = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        if mapped[: len(self.token)] != self.token.encode():
            raise OSError("the path leads to another file")
        return mapped


def _allocate_together(nbytes: int, group: dist.ProcessGroup) -> _Memory | None:
    """New shared memory with `nbytes` for each member; None on all members where the mapping fails on any member."""
    current, rank, members = world(), group.rank(), group.size()
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    size = _AREAS * members * nbytes
    name = f"shared memory of {group.group_name}, {nbytes} bytes"
    file, mapped = None, None
    if rank == 0:
        offer = _Offer("", "", "")  # no member can map this
        with suppress(OSError):
            file = os.memfd_create("weft")
            os.posix_fallocate(file, 0, size)  # else the kernel kills a process that writes when memory is short
            token = secrets.token_hex(16)
            os.pwrite(file, token.encode(), 0)
            offer = _Offer(_machine(), f"/proc/{os.getpid()}/fd/{file}", token)
        current.publish(name, "\n".join((offer.machine, offer.path, offer.token)).encode())
    else:
        offer = _Offer(*current.wait_for_message(name).decode().split("\n"))
    with suppress(OSError, ValueError):
        mapped = offer.map(size)
    current.publish(f"{name}, member {rank}", b"yes" if mapped is not None else b"no")
    answers = [current.wait_for_message(f"{name}, member {member}") for member in range(members)]
    if file is not None:
        os.close(file)
    if mapped is None or b"no" in answers:
        return None
    return _Memory(torch.frombuffer(mapped, dtype=torch.uint8), members, nbytes)


def _machine() -> str:
    """A string that is equal for processes with the same memory and network.

    Two network or PID namespaces of a machine count as two machines.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid")]
    return " ".join(map(str, (boot, os.getuid(), *spaces)))
