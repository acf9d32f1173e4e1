"""Rendezvous of a launcher's processes, including restarts after a failure.

`launch` calls `meet` before initializing the process group.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

NAME = "weft/name of the attempt"  # key of the name drawn by rank 0
LOOK_SECONDS = 0.02  # between two looks at the store


def meet(timeout: float) -> dict[str, Any]:
    """The arguments store, rank and world_size for `init_process_group`.

    Taken from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    timeout: seconds to wait for each rank. Communication: the ranks meet in the store.
    Raises RuntimeError if a rank is missing after `timeout` seconds.
    """
    store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    return {"store": of_this_attempt(store, rank, ranks, timeout), "rank": rank, "world_size": ranks}


def keeper_of_store() -> str:
    """The host process of the ranks' store, in words for an error: "torchrun's agent" or "rank 0".

    Decided as torch does, by TORCHELASTIC_USE_AGENT_STORE.
    """
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def of_this_attempt(store: Store, rank: int, ranks: int, timeout: float) -> Store:
    """A part of the store without keys of earlier attempts of this run.

    torchrun's agent keeps one store over all restarts (https://github.com/pytorch/pytorch/issues/135712). In a shared
    part, restarted processes would read keys of dead processes, for example addresses. The agent's restart count
    cannot name the part: a restarted agent counts from 0 again.
    Rank 0 therefore draws a random name and stores it under NAME. Every other rank writes a random word under this
    name, and trusts the name only once rank 0 has returned the word. Under the name of an earlier attempt nobody
    returns it.
    Raises RuntimeError if a rank does not come within `timeout` seconds.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(NAME, name)
        for other in range(1, ranks):
            store.set(f"{name}/heard/{other}", store.get(f"{name}/here/{other}").decode())
        return PrefixStore(name, store)
    word, end = uuid.uuid4().hex, time.monotonic() + timeout
    while time.monotonic() < end:
        name = store.get(NAME).decode()
        store.set(f"{name}/here/{rank}", word)
        answer = f"{name}/heard/{rank}"
        if store.check([answer]) and store.get(answer).decode() == word:
            return PrefixStore(name, store)
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"rank 0 has not answered rank {rank} for {timeout:g} s at the start of the run")
