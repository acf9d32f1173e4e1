"""`check_order`: a debug mode where ranks with different plans raise an error instead of hanging.

Plans, gradient buckets and gathers call `announce` before communicating; without a check the call costs nothing.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from weft.mesh import ProcessMesh
from weft.mesh.extension import is_number

from ..world.groups import format_ranks, this_rank

STRAGGLER_SECONDS = 0.5  # wait after a difference is found, for the error to name ranks about to arrive, too
FAREWELL_SECONDS = 1.0  # how long rank 0 keeps the store after an error, for waiting ranks to read the reason
REMEDY = "the ranks' programs diverged: call the same reshards in the same order on every rank that a plan involves"


class OrderError(RuntimeError):
    """Ranks were about to run different plans, or a rank did not come; the message names the ranks and plans."""


@contextmanager
def check_order(timeout: float = 60.0) -> Iterator[None]:
    """Inside, each rank announces the next plan to run, and waits until all ranks of the plan have announced the same.

    timeout: seconds to wait for the plan's ranks before each plan. Each plan costs a few round trips to a store on rank
        0, at MASTER_ADDR, else at this host's name.

    Communication: all ranks of the world enter together. Rank 0 keeps the store and leaves last, after waiting for the
    rest up to `timeout`, or briefly after an error. The other ranks leave at once.
    Raises OrderError where plans differ or a rank does not come. The check has then failed on every rank of the world:
    waiting ranks raise at once, the other ranks at the next plan, with the same message.
    Raises RuntimeError inside another check, ValueError unless the timeout is finite and > 0.
    """
    global _check
    if _check is not None:
        raise RuntimeError("check_order is on already; leave it before entering another")
    if not (is_number(timeout) and 0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r} s; give a finite number of seconds > 0")
    _check = check = _Check(timeout)
    reason = ""
    try:
        yield
    except BaseException as error:
        reason = f"with {type(error).__name__}: {error}"
        raise
    finally:
        _check = None
        check.leave(reason)


def announce(plan: object, ranks: Sequence[int] | None = None, meshes: Sequence[ProcessMesh] = ()) -> None:
    """Inside `check_order`, waits until all `ranks` are about to run `plan`; elsewhere returns at once.

    ranks: by default the ranks of `meshes`.

    Plans are the same if their text, ranks and `meshes` are equal. Threads wait in turn: autograd's thread and the main
    thread must alternate alike on all ranks.
    Raises OrderError: see `check_order`.
    """
    check = _check
    if check is not None:
        member_ranks = sorted({rank for mesh in meshes for rank in mesh} if ranks is None else ranks)
        digests = tuple(mesh.digest for mesh in meshes)
        location = " to ".join(dict.fromkeys(str(mesh) for mesh in meshes)) or format_ranks(member_ranks)
        check.announce(_Announced(f"{plan} on {location}", tuple(member_ranks), digests))


@dataclass(frozen=True, slots=True)
class LazyText:
    """A plan's description for `announce`. The text takes time to make, and is made inside `check_order` only."""

    make: Callable[[], str]

    def __str__(self) -> str:
        return self.make()


@dataclass(frozen=True, slots=True)
class _Announced:
    """A plan about to run on a rank."""

    text: str  # the plan as printed, and where it runs
    ranks: tuple[int, ...]  # that run the plan, ascending
    digests: tuple[str, ...]  # of its meshes

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, value: bytes) -> _Announced:
        announced = json.loads(value)
        return cls(announced["text"], tuple(announced["ranks"]), tuple(announced["digests"]))


class _Check:
    """A `check_order` under way: compares plans pair by pair.

    The n-th plan common to two ranks must be the same on both. Plans on disjoint meshes may run in any order.

    Keys in the store, for ranks r and s:
    r>s/n: the n-th plan of r for s; s deletes the key.
    latest/r: the latest plan of r. left/r: r has left, and why.
    failed: the error message for all ranks.
    """

    def __init__(self, timeout: float) -> None:
        global _last_store
        self._timeout = timeout
        self._rank, self._size = this_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._count: dict[int, int] = defaultdict(int)
        address: list[object] = [None, None]
        if self._rank == 0:
            try:
                _last_store = self._store = _store(_host(), 0, master=True)
                address = [self._store.host, self._store.port]
            except dist.DistError as error:  # the broadcast tells the waiting ranks
                address = [None, str(error)]
        dist.broadcast_object_list(address, src=0)
        if address[0] is None:
            raise RuntimeError(
                f"check_order cannot make its store on rank 0, at {_host()}: {address[1]}; "
                f"set MASTER_ADDR to an address of rank 0's host"
            )
        if self._rank != 0:
            self._store = _store(str(address[0]), int(str(address[1])), master=False)

    def announce(self, own_plan: _Announced) -> None:
        peers = [rank for rank in own_plan.ranks if rank != self._rank]
        if not peers or self._rank not in own_plan.ranks:
            return
        with self._lock:
            try:
                self._raise_if_failed()
                for peer in peers:
                    self._store.set(f"{self._rank}>{peer}/{self._count[peer]}", own_plan.encode())
                self._store.set(f"latest/{self._rank}", own_plan.encode())
                self._meet(own_plan, peers)
                for peer in peers:
                    self._store.delete_key(self._key(peer))
                    self._count[peer] += 1
            except dist.DistError as error:
                raise OrderError(
                    f"rank {self._rank} is about to run {own_plan.text}, but cannot reach rank 0, which keeps the "
                    f"store of check_order; see whether the process of rank 0 has ended"
                ) from error

    def _meet(self, own_plan: _Announced, peers: Sequence[int]) -> None:
        """Waits until all peers have announced the same plan as this rank."""
        announced_by = {self._rank: own_plan}
        end = time.monotonic() + self._timeout
        different, pause = False, 1e-4
        while True:
            # Read before the announcements: a rank that announces and leaves in between is not counted as missing.
            departed = {peer for peer in peers if peer not in announced_by and self._has(f"left/{peer}")}
            for peer in sorted(
                {rank for announced in announced_by.values() for rank in announced.ranks} - set(announced_by)
            ):
                if self._has(self._key(peer)):
                    announced_by[peer] = _Announced.decode(self._store.get(self._key(peer)))
            missing = [rank for rank in peers if rank not in announced_by]
            if not different and any(announced != own_plan for announced in announced_by.values()):
                different, end = True, min(end, time.monotonic() + STRAGGLER_SECONDS)
            if not missing and not different:
                return
            self._raise_if_failed()
            timed_out = time.monotonic() > end
            if different and (timed_out or not missing):
                self._fail("ranks are about to run different plans:", announced_by, missing, REMEDY)
            if not different and (timed_out or departed & set(missing)):
                waited = f"waited {self._timeout:g} s" if timed_out else "still waits"
                remedy = (
                    "every rank of a plan must run it: see above what these ranks did instead, or give check_order a "
                    "longer timeout"
                )
                self._fail(
                    f"rank {self._rank} {waited} for other ranks to run {own_plan.text}:", announced_by, missing, remedy
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _fail(self, problem: str, announced_by: Mapping[int, _Announced], missing: Sequence[int], remedy: str) -> None:
        """Raises OrderError here and on all ranks; the first rank to fail sets the message."""
        by_plan: dict[_Announced, list[int]] = defaultdict(list)
        for rank, announced in sorted(announced_by.items()):
            by_plan[announced].append(rank)
        lines = [problem, *(f"  {format_ranks(ranks)}: {announced.text}" for announced, ranks in by_plan.items())]
        for rank in missing:
            latest_key, left_key, departure = f"latest/{rank}", f"left/{rank}", ""
            latest_plan = _Announced.decode(self._store.get(latest_key)).text if self._has(latest_key) else "none yet"
            if self._has(left_key):
                departure = f" (it left check_order {self._store.get(left_key).decode()}".rstrip() + ")"
            lines.append(f"  rank {rank} did not come; its latest plan: {latest_plan}{departure}")
        message = "\n".join([*lines, remedy])
        raise OrderError(self._store.compare_set("failed", "", message).decode())

    def _raise_if_failed(self) -> None:
        if self._has("failed"):
            raise OrderError(self._store.get("failed").decode())

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _key(self, peer: int) -> str:
        return f"{peer}>{self._rank}/{self._count[peer]}"

    def leave(self, reason: str) -> None:
        """Rank 0 stays until all ranks have left or time is up: the store ends with rank 0's process."""
        with suppress(dist.DistError):  # the process of rank 0 has ended
            self._store.set(f"left/{self._rank}", reason)
            end = time.monotonic() + (min(FAREWELL_SECONDS, self._timeout) if reason else self._timeout)
            left_keys = [f"left/{rank}" for rank in range(self._size)]
            while self._rank == 0 and time.monotonic() < end and not self._store.check(left_keys):
                time.sleep(0.002)


_check: _Check | None = None
_last_store: TCPStore | None = None  # rank 0 keeps the store until the next check: other ranks may still be inside


def _store(host: str, port: int, *, master: bool) -> TCPStore:
    return TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=60))


def _host() -> str:
    """This process's host name, to which the ranks connect."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return "localhost"
    return host
