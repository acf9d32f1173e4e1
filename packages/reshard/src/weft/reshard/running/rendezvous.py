"""Process groups made by their members alone, each under a name that follows from its ranks.

torch.distributed.new_group() is a call of the whole world and names groups by how many were made before. Where ranks make
different groups, as when each works on a part of its own, it pairs members of one with members of another. Its
use_local_synchronization asks the members alone, but counts as well. So groups are made here as new_group() makes them, but
under a digest of their ranks: who makes another group has another name, and is not met.

NCCL: where init_process_group() was given a device_id, torch would split the world's communicator, which every rank of the
world must take part in. The members make a communicator of their own instead, at once; without a device_id, NCCL makes
it in their first collective. Nothing here is a call of ranks outside of the group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
    _world,
)

PREFIX = "weft-"  # how the names of these groups begin
REMEDY = (
    "all ranks of a group must make it: use the meshes that a rank shares with others in one order on all of them, or allow "
    "more time with init_process_group(timeout=...)"
)


def make_group(ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup:
    """A process group of `ranks`, ascending, of which this rank is one, on the backend of the world.

    purpose: tells it from other groups of these ranks.
    Communication: waits for the other members, through the world's store and as long as its timeout, which is that of
    init_process_group().
    Raises RuntimeError where members do not come, or know of other ranks; it names them and what they make instead.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None, "asked for where there is a world"
    text = f"ranks {', '.join(map(str, ranks))} on {dist.get_backend()}" + (f" for {purpose}" if purpose else "")
    name = PREFIX + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    store = _get_default_store()
    members = _Members(PrefixStore("weft", store), name, text, ranks, rank)
    members.meet("to make")
    with _unbound(world) as device, unset_fake_temporarily():
        group: dist.ProcessGroup
        group, _ = _new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            dist.get_backend(),
            store,
            name,  # type: ignore[arg-type]  # torch 2.13 has a type of its own for names
            timeout=_get_default_timeout(dist.get_backend()),
            device_id=device,
            group_desc="weft",
        )
    _world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    members.meet("to use")  # a rank that left before the others are connected would make them fail
    return group


def tell(what: str, value: bytes) -> None:
    """Has a few bytes known to all ranks under a name. Communication: a request to the world's store; TCPStore sends no answer."""
    PrefixStore("weft", _get_default_store()).set(f"told/{what}", value.hex())


def told(names: Sequence[str]) -> list[bytes | None]:
    """The bytes told under each name so far, or None. Communication: two requests to the world's store."""
    store = PrefixStore("weft", _get_default_store())
    keys = [f"told/{name}" for name in names]
    if not store.check(keys):
        return [bytes.fromhex(store.get(key).decode()) if store.check([key]) else None for key in keys]
    several = store.has_extended_api()  # type: ignore[attr-defined]  # a FileStore has not
    values = store.multi_get(keys) if several else [store.get(key) for key in keys]
    return [bytes.fromhex(value.decode()) for value in values]


def patience() -> float:
    """The timeout of the world's store, in seconds: how long a rank waits for a message."""
    seconds: float = _get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    return seconds


def hear(what: str) -> bytes:
    """What another rank has told under that name. Communication: waits for it, as long as the store's timeout.

    Raises RuntimeError where nobody tells it in that time.
    """
    store = _get_default_store()
    try:
        return bytes.fromhex(PrefixStore("weft", store).get(f"told/{what}").decode())
    except dist.DistError as error:
        seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
        raise RuntimeError(
            f"rank {dist.get_rank()} waited {seconds:g} s to be told {what}; the other rank has failed, or runs another program"
        ) from error


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """The device of the world's communicator, which inside does not count as one to split."""
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


class _Members:
    """Those of one group, who meet in the store.

    Keys: making/r, the group that rank r makes now; name/ranks, what the first member knows of it; name/when/r, that r has
    come; name/when/count, how many have; name/when/all, that all have.
    """

    def __init__(self, store: Store, name: str, text: str, ranks: Sequence[int], rank: int) -> None:
        self._store, self._name, self._text, self._ranks, self._rank = store, name, text, ranks, rank

    def meet(self, purpose: str) -> None:
        """Returns when all members have come."""
        store, at = self._store, f"{self._name}/{purpose}"
        known = store.compare_set(f"{self._name}/ranks", "", self._text).decode()
        if known != self._text:
            raise RuntimeError(
                f"rank {self._rank} makes a group of {self._text}, which another member makes of {known}"
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
                f"rank {self._rank} waited {seconds:g} s for the others {purpose} a group of "
                f"{self._text}. {'. '.join(map(self._whereabouts, missing))}. {REMEDY}"
            ) from error
        store.delete_key(f"making/{self._rank}")

    def _whereabouts(self, rank: int) -> str:
        key = f"making/{rank}"
        if not self._store.check([key]):
            return f"Rank {rank} did not come, and makes no other group"
        return f"Rank {rank} makes one of {self._store.get(key).decode()}"
