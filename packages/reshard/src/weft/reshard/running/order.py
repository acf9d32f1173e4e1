"""A check that all ranks run the same plans in the same order: a debug mode that turns a hang into an error."""

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

from .groups import this_rank

STRAGGLER_SECONDS = 0.5  # for ranks about to arrive when a difference is found: the error names them too
FAREWELL_SECONDS = 1.0  # how long rank 0 stays when it leaves with an error, so that those who wait for it see why
REMEDY = "the ranks' programs diverged: call the same reshards in the same order on every rank that a plan involves"


class OrderError(RuntimeError):
    """Two ranks were about to run different plans, or one of them did not come; the message names ranks and plans."""


@contextmanager
def check_order(timeout: float = 60.0) -> Iterator[None]:
    """Inside, each rank tells the others which plan it is about to run, and waits until they are about to run it too.

    timeout: seconds to wait for the others before a plan. Each plan costs some round trips to a store on rank 0, at
    MASTER_ADDR, or where that is not set at this host's name.
    Communication: all ranks of the world enter together. Rank 0 keeps the store, and leaves last: it waits for the
    others up to `timeout`, or shortly where it leaves with an error. The others leave at once.
    Raises OrderError where plans differ or a rank does not come. The check has failed then, on every rank of the world:
    who waits raises at once, who announces later raises then, all with the same message.
    Raises RuntimeError where a check is on already, ValueError for a timeout that is not finite and > 0.
    """
    global _check
    if _check is not None:
        raise RuntimeError("check_order is on already; leave it before entering another")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r} s; give a finite number of seconds > 0")
    _check = check = _Check(timeout)
    why = ""
    try:
        yield
    except BaseException as error:
        why = f"with {type(error).__name__}: {error}"
        raise
    finally:
        _check = None
        check.leave(why)


def announce(plan: object, ranks: Sequence[int] | None = None, meshes: Sequence[ProcessMesh] = ()) -> None:
    """Waits until all `ranks` are about to run `plan`, where `check_order` is on; returns at once where it is not.

    ranks: those of the meshes where None.
    Plans are the same if they print the same, on the same ranks and the same `meshes`.
    Threads may call it: one waits at a time, as autograd's thread and the main thread must take turns alike everywhere.
    Raises OrderError: see `check_order`.
    """
    check = _check
    if check is not None:
        taking_part = sorted({rank for mesh in meshes for rank in mesh} if ranks is None else ranks)
        digests = tuple(mesh.digest for mesh in meshes)
        on = " to ".join(dict.fromkeys(str(mesh) for mesh in meshes)) or named_ranks(taking_part)
        check.announce(_Said(f"{plan} on {on}", tuple(taking_part), digests))


@dataclass(frozen=True, slots=True)
class Words:
    """What `announce` is given where its words take time to make: they are made where a check is on."""

    make: Callable[[], str]

    def __str__(self) -> str:
        return self.make()


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank is about to run."""

    text: str
    ranks: tuple[int, ...]
    digests: tuple[str, ...]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, value: bytes) -> _Said:
        said = json.loads(value)
        return cls(said["text"], tuple(said["ranks"]), tuple(said["digests"]))


class _Check:
    """Says what this rank is about to run, pair by pair: the n-th plan that concerns two ranks is the same for both.

    What other ranks run makes no difference to a pair, so disjoint meshes may run whatever they like at once.

    Keys: r>s/n, the n-th plan that r announces to s, deleted by s; latest/r; left/r, how r left; failed, why all raise.
    """

    def __init__(self, timeout: float) -> None:
        global _kept
        self._timeout = timeout
        self._rank, self._size = this_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._count: dict[int, int] = defaultdict(int)
        where: list[object] = [None, None]
        if self._rank == 0:
            try:
                _kept = self._store = _store(_host(), 0, master=True)
                where = [self._store.host, self._store.port]
            except dist.DistError as error:  # the others are told, as they wait for it
                where = [None, str(error)]
        dist.broadcast_object_list(where, src=0)
        if where[0] is None:
            raise RuntimeError(
                f"check_order cannot make its store on rank 0, at {_host()}: {where[1]}; "
                f"set MASTER_ADDR to an address of rank 0's host"
            )
        if self._rank != 0:
            self._store = _store(str(where[0]), int(str(where[1])), master=False)

    def announce(self, mine: _Said) -> None:
        peers = [rank for rank in mine.ranks if rank != self._rank]
        if not peers or self._rank not in mine.ranks:
            return
        with self._lock:
            try:
                self._raise_if_failed()
                for peer in peers:
                    self._store.set(f"{self._rank}>{peer}/{self._count[peer]}", mine.encode())
                self._store.set(f"latest/{self._rank}", mine.encode())
                self._meet(mine, peers)
                for peer in peers:
                    self._store.delete_key(self._key(peer))
                    self._count[peer] += 1
            except dist.DistError as error:
                raise OrderError(
                    f"rank {self._rank} is about to run {mine.text}, and rank 0, which keeps the store of check_order, "
                    f"cannot be reached; see whether its process has ended"
                ) from error

    def _meet(self, mine: _Said, peers: Sequence[int]) -> None:
        """Returns when all peers have said what this rank says."""
        heard = {self._rank: mine}
        end = time.monotonic() + self._timeout
        different, pause = False, 1e-4
        while True:
            left = {
                peer for peer in peers if peer not in heard and self._has(f"left/{peer}")
            }  # before it is looked for
            for peer in sorted({rank for said in heard.values() for rank in said.ranks} - set(heard)):
                if self._has(self._key(peer)):
                    heard[peer] = _Said.decode(self._store.get(self._key(peer)))
            missing = [rank for rank in peers if rank not in heard]
            if not different and any(said != mine for said in heard.values()):
                different, end = True, min(end, time.monotonic() + STRAGGLER_SECONDS)
            if not missing and not different:
                return
            self._raise_if_failed()
            over = time.monotonic() > end
            if different and (over or not missing):
                self._fail("ranks are about to run different plans:", heard, missing, REMEDY)
            if not different and (over or left & set(missing)):
                waited = f"waited {self._timeout:g} s" if over else "waits in vain"
                remedy = "every rank of a plan must run it; see what those did instead, or give them a longer timeout"
                self._fail(f"rank {self._rank} {waited} for others to run {mine.text}:", heard, missing, remedy)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _fail(self, what: str, heard: Mapping[int, _Said], missing: Sequence[int], remedy: str) -> None:
        """Raises on this rank, and lets all others raise the same; the first rank to fail is the one heard."""
        by_plan: dict[_Said, list[int]] = defaultdict(list)
        for rank, said in sorted(heard.items()):
            by_plan[said].append(rank)
        lines = [what, *(f"  {named_ranks(ranks)}: {said.text}" for said, ranks in by_plan.items())]
        for rank in missing:
            latest, left = f"latest/{rank}", f"left/{rank}"
            said_last = _Said.decode(self._store.get(latest)).text if self._has(latest) else "none yet"
            gone = f" (it left check_order {self._store.get(left).decode()}".rstrip() + ")" if self._has(left) else ""
            lines.append(f"  rank {rank} did not come; its latest plan: {said_last}{gone}")
        message = "\n".join([*lines, remedy])
        raise OrderError(self._store.compare_set("failed", "", message).decode())

    def _raise_if_failed(self) -> None:
        if self._has("failed"):
            raise OrderError(self._store.get("failed").decode())

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _key(self, peer: int) -> str:
        return f"{peer}>{self._rank}/{self._count[peer]}"

    def leave(self, why: str) -> None:
        """Rank 0 stays until the others have left too, or their time is over: its process may end with it."""
        with suppress(dist.DistError):  # rank 0 has gone
            self._store.set(f"left/{self._rank}", why)
            end = time.monotonic() + (min(FAREWELL_SECONDS, self._timeout) if why else self._timeout)
            others = [f"left/{rank}" for rank in range(self._size)]
            while self._rank == 0 and time.monotonic() < end and not self._store.check(others):
                time.sleep(0.002)


_check: _Check | None = None
_kept: TCPStore | None = None  # rank 0's, until the next check: ranks may still be inside when it has left


def _store(host: str, port: int, *, master: bool) -> TCPStore:
    return TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=60))


def _host() -> str:
    """Where the other ranks find this one."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return "localhost"
    return host


def named_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 4-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
