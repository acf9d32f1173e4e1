"""Ranks that meet in a store used by an earlier attempt."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from weft.models.train.agreement import store_of_attempt

RANKS = 3


def meeting(store: dist.Store, ranks: list[int], threads: ThreadPoolExecutor) -> list[Future[dist.Store]]:
    return [threads.submit(store_of_attempt, store, rank, RANKS, 10.0) for rank in ranks]


@pytest.mark.parametrize("late", range(RANKS))
def test_ranks_that_are_started_again_find_nothing_of_those_before(late: int) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as threads:
        before = [each.result() for each in meeting(store, list(range(RANKS)), threads)]
        before[0].set("address", "where nobody is now")
        begun = meeting(store, [rank for rank in range(RANKS) if rank != late], threads)
        threading.Event().wait(0.1)  # ranks present have read the earlier attempt's name
        again = [each.result() for each in [*begun, *meeting(store, [late], threads)]]
    again[0].set("word", "of one")
    assert all(each.get("word") == b"of one" for each in again)
    assert not any(each.check(["address"]) for each in again)


def test_a_rank_that_is_not_answered_says_so() -> None:
    store = dist.HashStore()
    store.set("weft/name of the attempt", "an earlier one")
    with pytest.raises(RuntimeError, match=r"rank 0 has not answered rank 1 for 0\.1 s"):
        store_of_attempt(store, 1, 2, 0.1)


@pytest.mark.exhaustive
def test_rank_0_names_each_rank_that_does_not_come() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with ThreadPoolExecutor(1) as threads:
        present = threads.submit(store_of_attempt, store, 2, 5, 0.5)
        with pytest.raises(RuntimeError, match=r"^ranks 1, 3, 4 of 5 did not come to the start of the run within 1 s"):
            store_of_attempt(store, 0, 5, 1.0)
        with pytest.raises(RuntimeError, match="rank 0 has not answered rank 2"):
            present.result()
