"""Where the processes that a launcher has started meet, also when it has started them again."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

NAME = "weft/name of the attempt"
LOOK_SECONDS = 0.02


def meet(timeout: float) -> dict[str, Any]:
    """What `init_process_group` is told of the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT speak of.

    timeout: seconds that a rank is waited for. Raises RuntimeError where one does not come in that time.
    """
    store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    return {"store": of_this_attempt(store, rank, ranks, timeout), "rank": rank, "world_size": ranks}


def keeper_of_store() -> str:
    """Who has the store that the ranks meet in: torchrun's agent where it says so, as torch reads it; rank 0 otherwise."""
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def of_this_attempt(store: Store, rank: int, ranks: int, timeout: float) -> Store:
    """A part of the store in which nothing stands yet.

    torchrun's agent keeps one store for all attempts (https://github.com/pytorch/pytorch/issues/135712), and what the
    processes of one that died have left in it, their addresses too, would be read by those of the next. Its number of restarts
    is no name for an attempt: that of an agent which was itself started again begins anew. So rank 0 draws a name, and answers
    each other rank with what that rank has drawn: a name of an earlier attempt has no such answer.
    Raises RuntimeError where a rank does not come in `timeout` seconds.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(NAME, name)
        for other in range(1, ranks):
            store.set(f"{name}/heard/{other}", store.get(f"{name}/here/{other}").decode())
        return PrefixStore(name, store)
    drawn, end = uuid.uuid4().hex, time.monotonic() + timeout
    while time.monotonic() < end:
        name = store.get(NAME).decode()
        store.set(f"{name}/here/{rank}", drawn)
        answer = f"{name}/heard/{rank}"
        if store.check([answer]) and store.get(answer).decode() == drawn:
            return PrefixStore(name, store)
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"rank 0 has not answered rank {rank} for {timeout:g} s, as the ranks of a run met")
