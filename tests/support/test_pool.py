"""The pool of worker processes: results, reuse of workers, and failures."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.limits import PATIENCE
from tests.support.pool import MAX_THREADS, Pool, RanksFailed


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def process_id() -> int:
    return os.getpid()


def environment() -> tuple[str | None, str | None, int]:
    return os.environ.get("TRITON_INTERPRET"), os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def summed_on_a_subgroup() -> int:
    group = dist.new_group([0, 2])
    x = torch.ones(1)
    if dist.get_rank() in (0, 2):
        dist.all_reduce(x, group=group)
    return int(x.item())


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ArithmeticError("the message of the rank")
    dist.all_reduce(torch.ones(1))


def exits_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def is_killed_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def a_long_sleep() -> None:
    time.sleep(10 * PATIENCE)


def sleeps_on(rank: int) -> None:
    if dist.get_rank() == rank:
        a_long_sleep()


def fails_while_others_sleep() -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("alone")
    a_long_sleep()


HELD: list[dist.ProcessGroup] = []  # groups that outlive their call


def holds_groups(count: int) -> int:
    HELD.extend(dist.new_group([0, 1]) for _ in range(count))
    return os.getpid()


def a_result_that_cannot_be_pickled() -> object:
    return lambda: None


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_results_come_by_rank(pool: Pool, ranks: int) -> None:
    assert pool.run(rank_and_size, ranks=ranks) == [(rank, ranks) for rank in range(ranks)]


def test_tensors_travel_both_ways_and_collectives_work(pool: Pool) -> None:
    for result in pool.run(summed, torch.arange(3.0), ranks=3):
        assert torch.equal(result, 6 * torch.arange(3.0))


def test_subgroups_work(pool: Pool) -> None:
    assert pool.run(summed_on_a_subgroup, ranks=3) == [2, 1, 2]


def test_processes_are_reused(pool: Pool) -> None:
    first = pool.run(process_id, ranks=4)
    assert len(set(first)) == 4
    assert pool.run(process_id, ranks=4) == first
    assert pool.run(process_id, ranks=2) == first[:2]


def test_workers_have_one_thread_and_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with Pool() as pool:
        assert pool.run(environment, ranks=1) == [(None, "1", 1)]
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_an_error_on_one_rank_is_raised_with_its_traceback_first(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="the message of the rank") as caught:
        pool.run(fails_on, 1, ranks=3)
    cause = caught.value.failures[0]
    assert cause.rank == 1
    assert "ArithmeticError" in cause.what
    assert "in fails_on" in cause.what


def test_an_error_does_not_wait_for_the_ranks_that_hang(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.pool.GRACE_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(fails_while_others_sleep, ranks=2)
    assert time.monotonic() - start < PATIENCE / 2
    assert [failure.rank for failure in caught.value.failures] == [1, 0]


def test_a_result_that_cannot_be_pickled_is_an_error(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(a_result_that_cannot_be_pickled, ranks=1)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        pytest.param(exits_on, "exit code 7", id="exit"),
        pytest.param(is_killed_on, "killed by SIGKILL", id="killed"),
    ],
)
def test_the_death_of_a_worker_is_named_first(pool: Pool, function: object, says: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(function, 1, ranks=2)  # type: ignore[arg-type]
    assert caught.value.failures[0].rank == 1
    assert says in caught.value.failures[0].what


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_shown_with_its_stack(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="no answer") as caught:
        pool.run(sleeps_on, 1, ranks=2, timeout=1)
    (hanging,) = caught.value.failures
    assert hanging.rank == 1
    assert "a_long_sleep" in hanging.what


def test_after_a_failure_the_next_call_has_fresh_workers(pool: Pool) -> None:
    before = pool.run(process_id, ranks=2)
    with pytest.raises(RanksFailed):
        pool.run(fails_on, 0, ranks=2)
    assert not set(before) & set(pool.run(process_id, ranks=2))
    assert pool.run(rank_and_size, ranks=2) == [(0, 2), (1, 2)]


def test_a_worker_that_died_between_calls_is_replaced(pool: Pool) -> None:
    (worker,) = pool.run(process_id, ranks=1)
    os.kill(worker, signal.SIGKILL)
    next(each.process for each in pool._workers if each.process.pid == worker).join(PATIENCE)
    assert pool.run(rank_and_size, ranks=1) == [(0, 1)]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not tell how many threads there are")
def test_a_worker_in_which_many_groups_live_on_is_replaced(pool: Pool) -> None:
    few = pool.run(holds_groups, 2, ranks=2)
    assert pool.run(process_id, ranks=2) == few
    many = pool.run(holds_groups, MAX_THREADS // 3 + 1, ranks=2)
    assert many == few
    assert not set(many) & set(pool.run(process_id, ranks=2))


@pytest.mark.parametrize("ranks", [0, 9])
def test_a_bad_number_of_ranks_is_refused(pool: Pool, ranks: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        pool.run(rank_and_size, ranks=ranks)
