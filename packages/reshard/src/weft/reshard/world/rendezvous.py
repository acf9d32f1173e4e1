"""Process groups made by their members alone, each under a name derived from its ranks.

torch.distributed.new_group() must be called by the whole world, and names groups by a counter. Where ranks make
different groups, because each works on a part of the model, the counters of different groups can agree, and their
members connect to each other. With use_local_synchronization only the members call, but the counter stays. Here
groups are made as in new_group(), but are named by a digest of the ranks: different groups have different names and
cannot connect.

NCCL: where init_process_group() was given a device_id, torch would split the world's communicator, a call of every
rank of the world. Here the members create a separate communicator at once; without a device_id, NCCL creates the
communicator in the first collective. Ranks outside the group are never called.

The same store carries small messages between ranks: `publish`, `published`, `wait_for_message`.
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

PREFIX = "weft-"  # of the names of these groups
REMEDY = (
    "all ranks of a group must make it: use the meshes that ranks share in the same order on all of these ranks, or "
    "allow more time with init_process_group(timeout=...)"
)


def make_group(ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup:
    """Makes a process group of `ranks`, ascending, including this rank, on the backend of the world.

    purpose: distinguishes several groups of the same ranks.
    Communication: waits for the other members through the world's store, up to the timeout given to
    init_process_group().
    Raises RuntimeError where members do not come in time, for example because they list different ranks. The message
    names these members, and the groups that they are making.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None, "the world exists, as `Processes` does"
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

    Communication: one request to the world's store, which TCPStore does not answer.
    """
    PrefixStore("weft", _get_default_store()).set(f"published/{name}", value.hex())


def published(names: Sequence[str]) -> list[bytes | None]:
    """The bytes published so far under each name; None for a name without bytes.

    Communication: two requests to the world's store if every name has bytes; otherwise one, and one or two a name.
    """
    store = PrefixStore("weft", _get_default_store())
    keys = [f"published/{name}" for name in names]
    if not store.check(keys):
        return [bytes.fromhex(store.get(key).decode()) if store.check([key]) else None for key in keys]
    several = store.has_extended_api()  # type: ignore[attr-defined]  # False for a FileStore
    values = store.multi_get(keys) if several else [store.get(key) for key in keys]
    return [bytes.fromhex(value.decode()) for value in values]


def patience() -> float:
    """The timeout of the world's store, in seconds. GradientPresence waits as long for another rank's message."""
    seconds: float = _get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    return seconds


def wait_for_message(name: str) -> bytes:
    """Waits until another rank publishes bytes under this name, and returns the bytes.

    Communication: with the world's store. Raises RuntimeError after the store's timeout.
    """
    store = _get_default_store()
    try:
        return bytes.fromhex(PrefixStore("weft", store).get(f"published/{name}").decode())
    except dist.DistError as error:
        seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
        raise RuntimeError(
            f"rank {dist.get_rank()} waited {seconds:g} s for the message {name!r} of another rank, which has failed "
            "or runs another program; see the other ranks' output"
        ) from error


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """The device of the world's communicator. Inside, the world counts as unbound, so torch splits nothing."""
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


class _Members:
    """The members of a new group, which meet in the store. Made by `make_group` on each member.

    name: the group's name, a digest of `text`. text: the ranks, the backend and the purpose, for messages.
    Keys in the store, where r is a rank and `at` is name/purpose:
    making/r: the group that rank r is making.
    name/ranks: the text of the first member. A member finds a different text only if two texts have one digest.
    at/r: rank r has come. at/count: number of ranks that have come. at/all: all have come.
    """

    def __init__(self, store: Store, name: str, text: str, ranks: Sequence[int], rank: int) -> None:
        self._store, self._name, self._text, self._ranks, self._rank = store, name, text, ranks, rank

    def meet(self, purpose: str) -> None:
        """Waits until all members have called this with the same purpose: "to make" the group, then "to use" it."""
        store, at = self._store, f"{self._name}/{purpose}"
        first_text = store.compare_set(f"{self._name}/ranks", "", self._text).decode()
        if first_text != self._text:
            raise RuntimeError(
                f"rank {self._rank} makes a group of {self._text}, which another member makes of {first_text}"
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
