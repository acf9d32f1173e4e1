"""The check of the order of plans: ranks that would hang raise instead, and name each rank's next step."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, OrderError, check_order, distribute, reshard
from weft.reshard.moving.order_check import announce

from tests.support.limits import PATIENCE, python_ratio
from tests.support.pool import RanksFailed

FOUR = ProcessMesh.grid(tp=4)


def said(plans, timeout=PATIENCE, stays=False):
    """Announces this rank's plans, with all ranks or the given ranks; returns the error's text, and its seconds.

    stays: whether a rank whose plans have run waits in `check_order` until the others have raised.
    """
    rank, text = dist.get_rank(), ""
    with check_order(timeout):
        dist.barrier()  # all have the store
        start = time.monotonic()  # making the store may take seconds, where the DNS does not answer torch's lookups
        try:
            for plan, ranks in plans[rank]:
                announce(plan, ranks)
        except OrderError as error:
            text = str(error)
        seconds = time.monotonic() - start
        if stays:
            dist.barrier()
    return text, seconds


EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param([[("A", EVERY), ("B", EVERY), ("A", EVERY)]] * 4, id="same"),
        pytest.param([[("A", (0, 1))], [("A", (0, 1))], [("B", (2, 3))], [("B", (2, 3))]], id="disjoint"),
        pytest.param(
            [[("A", (0, 1))], [("A", (0, 1)), ("B", (1, 2))], [("B", (1, 2)), ("C", (2, 3))], [("C", (2, 3))]],
            id="chain",
        ),
        pytest.param([[], [("A", (1, 2))], [("A", (1, 2))], []], id="some-do-nothing"),
    ],
)
def test_plans_that_agree_run(pool, plans):
    assert [text for text, _ in pool.run(said, plans, ranks=4)] == [""] * 4


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param([[("A", EVERY)]] * 3 + [[("B", EVERY)]], id="one-differs"),
        pytest.param([[("A", EVERY), ("B", EVERY)]] * 3 + [[("B", EVERY), ("A", EVERY)]], id="swapped"),
        pytest.param([[("X", EVERY), ("A", EVERY)]] * 3 + [[("X", EVERY), ("B", EVERY)]], id="later"),
    ],
)
def test_every_rank_raises_where_two_differ(pool, plans):
    for text, seconds in pool.run(said, plans, ranks=4):
        assert "about to run different plans" in text
        assert "rank 3: B" in text
        assert ": A" in text
        assert seconds < PATIENCE / 2


def test_a_rank_that_does_not_come_is_named(pool):
    plans = [[("A", EVERY), ("B", EVERY)]] * 3 + [[("A", EVERY)]]
    results = pool.run(said, plans, 1.0, True, ranks=4)
    for text, _ in results[:3]:
        assert "rank 3 did not come; its latest plan: A" in text
        assert "to run B" in text
    assert results[3][0] == ""


def test_a_failure_reaches_those_who_wait_for_the_ones_that_failed(pool):
    """0 waits for 1, and 1 for 2, which differs from 3."""
    plans = [[("A", (0, 1))], [("B", (1, 2))], [("X", (2, 3))], [("Y", (2, 3))]]
    results = pool.run(said, plans, ranks=4)
    assert len({text for text, _ in results}) == 1  # the same story
    for text, seconds in results:
        assert "rank 2: X on ranks 2, 3\n  rank 3: Y on ranks 2, 3" in text
        assert seconds < PATIENCE / 2


def test_the_same_text_on_other_ranks_differs(pool):
    results = pool.run(said, [[("A", (0, 1))], [("A", (0, 1, 2))], []], PATIENCE, True, ranks=3)
    for text, seconds in results[:2]:
        assert "rank 0: A on ranks 0, 1\n  rank 1: A on ranks 0-2" in text
        assert seconds < PATIENCE / 2


def test_a_rank_that_left_is_not_waited_for(pool):
    text, seconds = pool.run(said, [[("A", (0, 1))], []], ranks=2)[0]
    assert "rank 1 did not come; its latest plan: none yet (it left check_order)" in text
    assert seconds < PATIENCE / 2


def left_with_an_error():
    with pytest.raises(KeyError) if dist.get_rank() == 0 else pytest.raises(OrderError) as raised, check_order():
        if dist.get_rank() == 0:
            raise KeyError("weights")
        announce("A", (0, 1))
    return str(raised.value)


def test_a_rank_that_left_with_an_error_says_why(pool):
    assert "(it left check_order with KeyError: 'weights')" in pool.run(left_with_an_error, ranks=2)[1]


def after_rank_0():
    with check_order(PATIENCE):
        if dist.get_rank() != 0:
            time.sleep(3)  # longer than rank 0 stays when it leaves with an error
            announce("A", (1, 2))


@pytest.mark.exhaustive
def test_rank_0_keeps_the_store_until_all_have_left(pool):
    pool.run(after_rank_0, ranks=3)


def announced_after_a_failure():
    with check_order():
        for plan in (f"of rank {dist.get_rank()}", "the same"):
            with pytest.raises(OrderError, match="rank 1: of rank 1"):
                announce(plan, (0, 1))
    with check_order():  # the next one starts anew
        announce("the same", (0, 1))


def test_a_failed_check_stays_failed(pool):
    pool.run(announced_after_a_failure, ranks=2)


def meshes_that_differ():
    """Only the order of the ranks differs: without the check each would take the other's part for its own."""
    mesh = ProcessMesh([0, 1] if dist.get_rank() == 0 else [1, 0], ["tp"])
    with check_order(), pytest.raises(OrderError, match=r"rank 1: .* on ProcessMesh\(tp=2, ranks=\[1, 0\]\)"):
        reshard(distribute(torch.arange(8.0), Layout(mesh, "tp: S(0)")), placements="")


def test_meshes_that_differ(pool):
    pool.run(meshes_that_differ, ranks=2)


def test_without_the_check_nothing_is_said():
    assert python_ratio(lambda: [announce("A", EVERY) for _ in range(100)], rounds=20) < 100 * 0.01


def reshards_that_differ():
    rows = 4 if dist.get_rank() == 3 else 8
    with check_order():
        reshard(distribute(torch.arange(8.0), Layout(FOUR, "tp: S(0)")), placements="")
        with pytest.raises(
            OrderError, match=r"rank 3: \(tp: S\(0\)\) -> \(tp: R\) of torch.float32 \(4,\): AllGather"
        ) as failed:
            reshard(distribute(torch.arange(float(rows)), Layout(FOUR, "tp: S(0)")), placements="")
    assert "of torch.float32 (8,)" in str(failed.value)


def backwards_too():
    with check_order(PATIENCE):
        x = distribute(torch.arange(8.0), Layout(FOUR, "tp: S(0)")).requires_grad_()
        reshard(x, placements="").sum().backward()
    with pytest.raises(RuntimeError, match="on already"), check_order(), check_order():
        pass
    with pytest.raises(ValueError, match="timeout is 0"), check_order(0):
        pass


def test_reshards_are_announced(pool):
    pool.run(reshards_that_differ, ranks=4)
    pool.run(backwards_too, ranks=4)


def a_dead_rank():
    with check_order(PATIENCE):
        if dist.get_rank() == 1:
            raise SystemExit(3)
        reshard(distribute(torch.arange(8.0), Layout(FOUR, "tp: S(0)")), placements="")


def test_a_dead_rank_is_named(pool):
    with pytest.raises(RanksFailed) as failed:
        pool.run(a_dead_rank, ranks=4)
    assert "rank 1" in str(failed.value)


def gradients_that_differ():
    """Rank 3 has one parameter fewer to synchronize."""
    weights = [torch.nn.Parameter(distribute(torch.ones(4), Layout(FOUR))) for _ in range(2)]
    module = torch.nn.ParameterList(weights if dist.get_rank() != 3 else weights[:1])
    sync = GradientSync(module)
    for weight in module:
        weight.to_local(grad_placements=[dtensor.Partial()]).backward(torch.ones(4))
    with check_order(PATIENCE), pytest.raises(OrderError, match=r"rank 3: gradients of shapes \[\(4,\)\]"):
        sync.wait()


def test_gradients_are_announced(pool):
    pool.run(gradients_that_differ, ranks=4)
