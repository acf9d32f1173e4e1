"""Sums over memory shared by a machine's processes equal an all-reduce, which runs where no memory is shared."""

import errno
import functools
import os
import random
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from weft.reshard.moving.collectives import Pending
from weft.reshard.moving.tree import Members
from weft.reshard.training import shared_memory
from weft.reshard.training.shared_memory import sum_parts
from weft.reshard.world.collective_bytes import received_bytes
from weft.reshard.world.groups import world_cache

from tests.support.collectives import Collectives
from tests.support.pool import RanksFailed

ELEMENTS = 300_000  # float32: more than the smallest size summed in shared memory
TURNS = 7  # rounds until the same numbers come again; drawing them takes longer than their sum


@functools.lru_cache(maxsize=100)
def numbers(rank: int, turn: int, elements: int) -> torch.Tensor:
    """Whole ones, of which a sum is exact."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-8, 9, (elements,), generator=generator).to(torch.int8)


@functools.lru_cache(maxsize=100)
def sums(ranks: int, turn: int, elements: int) -> torch.Tensor:
    return torch.stack([numbers(rank, turn, elements) for rank in range(ranks)]).sum(0, dtype=torch.int16)


def everyone() -> Members:
    return Members(range(dist.get_world_size()), (dist.get_world_size(),), (0,))


def start(round: int, elements: int = ELEMENTS, dtype: torch.dtype = torch.float32) -> Pending:
    mine = numbers(dist.get_rank(), round % TURNS, elements).to(dtype)
    parts = [mine[:10].view(2, 5), mine[10:10], mine[10:]]
    pending = Pending(sum_parts(parts, dist.group.WORLD, everyone()))
    assert not parts, "they live no longer"
    return pending


def truth(round: int, elements: int = ELEMENTS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sums(dist.get_world_size(), round % TURNS, elements).to(dtype)


def memory() -> "shared_memory._Memory | None":
    known = world_cache().get("shared memory", {})
    return known.get(dist.group.WORLD.group_name)


def of_dtypes_and_sizes() -> None:
    for round, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16)):
        for elements in (ELEMENTS, 3 * ELEMENTS, ELEMENTS + 1):
            assert torch.equal(start(round, elements, dtype).wait(), truth(round, elements, dtype)), (dtype, elements)
    held = memory()
    assert held is not None and held.nbytes >= 3 * ELEMENTS * 8, "it grew with what was wanted"


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shared_memory_gives_the_sum_in_every_dtype_and_size(pool, ranks: int) -> None:
    pool.run(of_dtypes_and_sizes, ranks=ranks)


def to_the_bit() -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    return Pending(sum_parts([torch.randn(ELEMENTS)], dist.group.WORLD, everyone())).wait()


def test_all_members_have_the_same_bits(pool) -> None:
    first, *others = pool.run(to_the_bit, ranks=4)
    assert all(torch.equal(first, each) for each in others)


def of_members_that_hurry_and_wait(seed: int) -> None:
    """Ranks pause at random, some before writing and some before reading: no number enters another round's sum."""
    moods = random.Random(seed + dist.get_rank())
    for round in range(60):
        time.sleep(moods.choice((0, 0, 0, 0.003)))
        pending = start(round)
        time.sleep(moods.choice((0, 0, 0, 0.003)))
        assert torch.equal(pending.wait(), truth(round)), round


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_one_after_the_other_do_not_mix(pool, ranks: int) -> None:
    pool.run(of_members_that_hurry_and_wait, 7, ranks=ranks)


def of_several_at_once() -> None:
    for round in range(0, 30, 3):
        several = [start(round + i, (i + 1) * ELEMENTS) for i in range(3)]
        order = [2, 0, 1] if round % 2 else [0, 1, 2]
        for i in order:
            assert torch.equal(several[i].wait(), truth(round + i, (i + 1) * ELEMENTS))


@pytest.mark.exhaustive
def test_while_one_is_under_way_others_go_by_themselves(pool) -> None:
    pool.run(of_several_at_once, ranks=3)


def a_result_stays() -> None:
    first = start(0).wait()
    for round in range(1, 4):
        start(round).wait()
    assert torch.equal(first, truth(0)), "nobody writes into what was returned"


def test_a_result_is_not_written_into_later(pool) -> None:
    pool.run(a_result_stays, ranks=2)


def counted() -> None:
    start(0).wait()
    with Collectives() as seen:
        start(1).wait()
    assert seen.kinds == ["all-reduce"]
    assert seen.nbytes == [received_bytes("all-reduce", dist.get_world_size(), ELEMENTS * 4, 0, 4)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_in_shared_memory_counts_as_an_all_reduce(pool, ranks: int) -> None:
    pool.run(counted, ranks=ranks)


def what_travels() -> tuple[int, ...]:
    """The numbers of elements passed to torch's all-reduce."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        start(0).wait()
        start(1, 1000).wait()  # a small sum goes to torch
        start(2, dtype=torch.int32).wait()
    return tuple(call.args[0].numel() for call in all_reduce.call_args_list)


def test_one_number_goes_by_the_group(pool) -> None:
    assert set(pool.run(what_travels, ranks=3)) == {(1, 1000, ELEMENTS)}


def on_two_machines() -> None:
    with mock.patch.object(shared_memory, "_machine", lambda: f"machine {dist.get_rank() == 1}"):
        assert torch.equal(start(0).wait(), truth(0))
    assert memory() is None


def without_room() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full):
        assert torch.equal(start(0).wait(), truth(0))
    assert memory() is None


def where_it_may_not_be_opened() -> None:
    def opened(path: object, *args: int) -> int:
        if dist.get_rank() == 2 and str(path).startswith("/proc/"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return own(path, *args)

    own = os.open
    with mock.patch.object(os, "open", opened):
        assert torch.equal(start(0).wait(), truth(0))
        assert torch.equal(start(1).wait(), truth(1))
    assert memory() is None


def of_five() -> None:
    assert torch.equal(start(0).wait(), truth(0))
    assert memory() is None


@pytest.mark.parametrize(
    ("case", "ranks"), [(on_two_machines, 3), (without_room, 2), (where_it_may_not_be_opened, 3), (of_five, 5)]
)
def test_without_shared_memory_it_is_an_all_reduce(pool, case, ranks: int) -> None:
    pool.run(case, ranks=ranks)


def of_a_member_that_dies() -> None:
    start(0).wait()
    assert memory() is not None
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="Connection"):
        start(1).wait()


def test_a_sum_with_a_dead_rank_fails(pool) -> None:
    with pytest.raises(RanksFailed, match="1 of 3 ranks failed"):
        pool.run(of_a_member_that_dies, ranks=3)


def mappings() -> tuple[int, int, int]:
    """Memory mappings of this process before a sum and after, and its open files afterwards."""
    world_cache()  # the world has changed
    before = _lines("/proc/self/maps")
    start(0).wait()
    return before, _lines("/proc/self/maps"), len(os.listdir("/proc/self/fd"))


def _lines(path: str) -> int:
    with open(path) as file:
        return sum("memfd:weft" in line for line in file)


def test_the_shared_memory_is_unmapped_with_the_group(pool) -> None:
    first, second = (pool.run(mappings, ranks=2) for _ in range(2))
    for (before, after, files), (before_again, after_again, files_again) in zip(first, second, strict=True):
        assert (before, after) == (before_again, after_again) == (0, 1)
        assert files_again <= files
