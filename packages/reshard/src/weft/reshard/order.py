"""A check that all ranks run the same plans in the same order: a debug mode that turns a hang into an error."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LEAVING_SECONDS = 5.0  # how long the rank that keeps the store waits for the others, once it is done itself


class OrderError(RuntimeError):
    """Two ranks were about to run different plans, or one of them did not come; the message names ranks and plans."""


@contextmanager
def check_order(timeout: float = 60.0) -> Iterator[None]:
    """Inside, each rank tells the others which plan it is about to run, and waits until they are about to run it too.

    timeout: seconds to wait for the others before a plan. Each plan costs some round trips to a store on rank 0.
    Communication: all ranks of the world enter together.
    Raises OrderError, on all ranks of the plans concerned, where they differ or a rank does not come; the check is over
    then. Raises RuntimeError where a check is on already.
    """
    global _check
    if _check is not None:
        raise RuntimeError("check_order is on already; leave it before entering another")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r} s; give a number of seconds > 0")
    _check = _Check(timeout)
    try:
        yield
    finally:
        check, _check = _check, None
        check.leave()


def announce(plan: object, ranks: Sequence[int]) -> None:
    """Waits until all `ranks` are about to run `plan`, where `check_order` is on; returns at once where it is not.

    Plans are the same if they print the same.

    Raises OrderError: see `check_order`.
    """
    if _check is not None:
        _check.announce(str(plan), ranks)


class _Check:
    """Says what this rank is about to run, pair by pair: the n-th plan that concerns two ranks is the same for both.

    A pair's keys make no difference of plans on other ranks, so disjoint meshes may run whatever they like at once.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._count: dict[int, int] = defaultdict(int)
        where: list[object] = [None, None]
        if self._rank == 0:
            self._store = _store("127.0.0.1" if _on_one_host() else os.environ["MASTER_ADDR"], 0, master=True)
            where = [self._store.host, self._store.port]
        dist.broadcast_object_list(where, src=0)
        if self._rank != 0:
            self._store = _store(str(where[0]), int(str(where[1])), master=False)

    def announce(self, plan: str, ranks: Sequence[int]) -> None:
        with self._lock:
            peers = [rank for rank in ranks if rank != self._rank]
            for peer in peers:
                self._store.set(self._key(self._rank, peer, self._count[peer]), plan)
            self._store.set(f"latest/{self._rank}", plan)
            plans = self._collect(plan, peers)
            for peer in peers:
                self._count[peer] += 1
            if any(other != plan for other in plans.values()):
                self._fail(_different({**plans, self._rank: plan}))

    def _collect(self, plan: str, peers: Sequence[int]) -> dict[int, str]:
        """The plan of each peer, once it has come."""
        end = time.monotonic() + self._timeout
        plans: dict[int, str] = {}
        pause = 1e-4
        while True:
            for peer in peers:
                key = self._key(peer, self._rank, self._count[peer])
                if peer not in plans and self._store.check([key]):
                    plans[peer] = self._store.get(key).decode()
                    self._store.delete_key(key)
            missing = [peer for peer in peers if peer not in plans]
            if not missing or any(other != plan for other in plans.values()):
                return plans
            failed = [peer for peer in missing if self._store.check([f"failed/{peer}"])]
            if failed:
                raise OrderError(self._store.get(f"failed/{failed[0]}").decode())
            if time.monotonic() > end:
                self._fail(self._absent(plan, missing))
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _absent(self, plan: str, missing: Sequence[int]) -> str:
        lines = [f"rank {self._rank} waited {self._timeout:g} s for others to run {plan}"]
        for peer in missing:
            latest = f"latest/{peer}"
            said = self._store.get(latest).decode() if self._store.check([latest]) else "none yet"
            lines.append(f"  rank {peer} did not come; its latest plan: {said}")
        return "\n".join(
            [*lines, "every rank of both meshes must run the reshard; a rank that is dead or elsewhere cannot"]
        )

    def _fail(self, message: str) -> None:
        self._store.set(f"failed/{self._rank}", message)
        raise OrderError(message)

    def _key(self, sender: int, receiver: int, count: int) -> str:
        return f"{sender}>{receiver}/{count}"

    def leave(self) -> None:
        """Rank 0 keeps the store for the others while they leave, if they do."""
        with suppress(dist.DistError, RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            end = time.monotonic() + LEAVING_SECONDS
            others = [f"left/{rank}" for rank in range(self._size)]
            while self._rank == 0 and time.monotonic() < end and not self._store.check(others):
                time.sleep(0.002)


_check: _Check | None = None


def _store(host: str, port: int, *, master: bool) -> TCPStore:
    return TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=60))


def _on_one_host() -> bool:
    return os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1")


def _different(plans: dict[int, str]) -> str:
    by_plan: dict[str, list[int]] = defaultdict(list)
    for rank, plan in sorted(plans.items()):
        by_plan[plan].append(rank)
    lines = ["ranks are about to run different plans:"]
    for plan, ranks in by_plan.items():
        lines.append(f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {plan}")
    return "\n".join([*lines, "each rank must call the same reshards in the same order"])
