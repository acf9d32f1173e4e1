"""Sums over the processes of one machine, by memory that they share: sockets would copy each byte into the kernel and out of it.

A member writes what it has into its own place, and when all have, each adds up all of them: every byte is written once and read once
by each. The others learn that it is written by an all-reduce of one number, on the group itself, so that who waits for a member that
is gone waits as for any collective. Of small groups alone: what each reads grows with the members.
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

from .collectives import Running, all_reduce, by_exchange
from .groups import of_this_world
from .issued import counted_as, received_bytes
from .worlds import world

_LEAST, _MOST = 1 << 18, 1 << 25  # bytes of a member's tensor that go so: of fewer, sockets are as quick
_MEMBERS = 4
# Of each member. A member writes the next sum's while others read the last one's; when that is over, all have read the one before.
_PLACES = 2


def summed(parts: list[Tensor], group: dist.ProcessGroup) -> Running:
    """The sum over the group's members of `parts`, one behind the other in a flat tensor.

    parts: of one dtype, and together of as many elements on every member. They are taken out of the list, and live no longer.
    The result is the same to the bit on every member. Communication: an all-reduce; of one number where the members share memory,
    which is counted as that of the whole.
    """
    memory = _memory(parts, group)
    flat_parts = [part.reshape(-1) for part in parts]
    parts.clear()
    if memory is None:
        flat = torch.cat(flat_parts)
        flat_parts.clear()
        return (yield from all_reduce(flat, "sum", group))
    elements = sum(map(len, flat_parts))
    places = memory.take(elements, flat_parts[0].dtype)
    torch.cat(flat_parts, out=places[group.rank()])
    flat_parts.clear()
    nbytes = received_bytes("all-reduce", group.size(), elements * places.itemsize, 0, places.itemsize)
    with counted_as("all-reduce", nbytes):
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None, "async_op=True returns the work"
    yield work
    flat = torch.add(*places) if len(places) == 2 else places.sum(0, dtype=places.dtype)
    memory.give_back()
    return flat


class _Memory:
    """Memory that the members of a group share: places for each, of `nbytes`.

    One sum at a time has them. One that nobody waits for keeps them: others may still read.
    """

    def __init__(self, shared: Tensor, members: int, nbytes: int) -> None:
        self.shared, self.nbytes = shared.view(_PLACES, members, nbytes), nbytes
        self.is_taken, self._turn = False, 0

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Each member's place, [members, elements], until they are given back."""
        self.is_taken, self._turn = True, (self._turn + 1) % _PLACES
        return self.shared[self._turn, :, : elements * dtype.itemsize].view(dtype)

    def give_back(self) -> None:
        self.is_taken = False


def _memory(parts: Sequence[Tensor], group: dist.ProcessGroup) -> _Memory | None:
    """What the members share with room for the parts of each; None where they share none, or another sum has it.

    All members get the same answer: they start and end their sums in one order. Communication: with the store, where more room is
    wanted than there was. The memory is there for as long as the group.
    """
    like, nbytes = parts[0], sum(part.nbytes for part in parts)
    if not (_LEAST <= nbytes <= _MOST and like.is_cpu and like.is_floating_point() and 2 <= group.size() <= _MEMBERS):
        return None
    if not by_exchange() or not hasattr(os, "memfd_create"):  # Linux alone has it
        return None
    known: dict[str, _Memory | None] = of_this_world().setdefault("shared memory", {})
    memory = known.get(group.group_name)
    if group.group_name not in known or (memory is not None and memory.nbytes < nbytes and not memory.is_taken):
        known[group.group_name] = memory = _agreed(nbytes, group)
    return memory if memory is not None and memory.nbytes >= nbytes and not memory.is_taken else None


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the first member tells the others: where its memory is, on which machine, and what is written there."""

    machine: str
    path: str
    token: str

    def map(self, nbytes: int) -> mmap.mmap:
        """Raises OSError or ValueError where that is not this process's to map."""
        if self.machine != _machine():
            raise OSError("it is on another machine")
        file = os.open(self.path, os.O_RDWR)
        try:
            mapped = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        if mapped[: len(self.token)] != self.token.encode():
            raise OSError("the path leads to another file")
        return mapped


def _agreed(nbytes: int, group: dist.ProcessGroup) -> _Memory | None:
    """New memory for so many bytes of each member, which has it or none; None where a member has none."""
    here, rank, members = world(), group.rank(), group.size()
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    size = _PLACES * members * nbytes
    name = f"shared memory of {group.group_name}, {nbytes} bytes"
    file, mapped = None, None
    if rank == 0:
        offer = _Offer("", "", "")  # which nobody can take
        with suppress(OSError):
            file = os.memfd_create("weft")
            os.posix_fallocate(file, 0, size)  # else the kernel kills who writes where there is no more memory
            token = secrets.token_hex(16)
            os.pwrite(file, token.encode(), 0)
            offer = _Offer(_machine(), f"/proc/{os.getpid()}/fd/{file}", token)
        here.tell(name, "\n".join((offer.machine, offer.path, offer.token)).encode())
    else:
        offer = _Offer(*here.hear(name).decode().split("\n"))
    with suppress(OSError, ValueError):
        mapped = offer.map(size)
    here.tell(f"{name}, member {rank}", b"yes" if mapped is not None else b"no")
    answers = [here.hear(f"{name}, member {member}") for member in range(members)]
    if file is not None:
        os.close(file)
    if mapped is None or b"no" in answers:
        return None
    return _Memory(torch.frombuffer(mapped, dtype=torch.uint8), members, nbytes)


def _machine() -> str:
    """The same for processes that share memory and a network: two namespaces of one machine are meant to be two machines."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid")]
    return " ".join(map(str, (boot, os.getuid(), *spaces)))
