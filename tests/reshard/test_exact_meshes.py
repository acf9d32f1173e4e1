"""Exact sums on shuffled ranks and more axes, by other collectives, in recomputation and in compiled code."""

import itertools

import pytest
import torch
import torch.distributed as dist
from weft.mesh import Layout, Partial, ProcessMesh
from weft.reshard import Link, Topology, distribute, exact_sums, plan, reshard
from weft.reshard.extension import record_received, replay_received
from weft.reshard.moving.dtensor import wrap

from tests.reshard.test_exact_reshard import NAMED, changed, layouts, local_of, value_of
from tests.reshard.test_exact_tree import numbers, same_bits, tree_of
from tests.support.collectives import Collectives


def on_shuffled_ranks(ranks, named):
    """Meshes whose ranks are in any order: a group lists its ranks in ascending order, not in the mesh's."""
    mesh, rank, shape = ProcessMesh(ranks, ("tp", "dp")), dist.get_rank(), (8, 16)
    with exact_sums(named):
        for number, (src, dst) in enumerate(itertools.product(layouts(mesh), layouts(mesh))):
            value = value_of(src, named, shape, torch.float32, number)
            local = local_of(value, src, named, rank)
            if all(isinstance(src[axis], Partial) for axis in ("dp", "tp")) and local.ndim == 4:
                local = local.transpose(0, 1).contiguous()  # stacked in the order of the mesh's axes
            found = reshard(wrap(local, src, shape), dst).to_local()
            expected = local_of(changed(value, src, dst, named), dst, named, rank)
            if all(isinstance(dst[axis], Partial) for axis in ("dp", "tp")) and expected.ndim == 4:
                expected = expected.transpose(0, 1)
            assert same_bits(found, expected), f"({src}) -> ({dst})"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "ranks, named",
    [
        pytest.param([[3, 1], [0, 2]], {"dp": 4, "tp": 4}, id="tp-before-dp"),
        pytest.param([[2, 0, 3, 1]], {"dp": 4, "tp": 2}, id="one-axis"),
        pytest.param([[1], [2], [0]], {"dp": 2, "tp": 3}, id="three"),
    ],
)
def test_ranks_in_any_order(pool, ranks, named):
    pool.run(on_shuffled_ranks, ranks, named, ranks=sum(map(len, ranks)))


def with_other_collectives(named):
    """torch's own all-gather instead of all-to-alls, and links of unlike speed, which split a reduction by axes."""
    mesh, rank, shape = ProcessMesh.grid(dp=2, tp=2), dist.get_rank(), (64, 1024)
    slow_dp = Topology({"dp": Link(1e-5, 1e9), "tp": Link(1e-6, 1e11)})
    slow_tp = Topology({"tp": Link(1e-5, 1e9), "dp": Link(1e-6, 1e11)})
    split = 0
    for level, topology in itertools.product((dist.DebugLevel.OFF, dist.DebugLevel.DETAIL), (None, slow_dp, slow_tp)):
        dist.set_debug_level(level)
        try:
            with exact_sums(named):
                for text in ("", "dp: S(0), tp: S(0)", "dp: S(1), tp: S(0)", "tp: S(0)"):
                    src, dst = Layout(mesh, "dp: P, tp: P"), Layout(mesh, text)
                    value = value_of(src, named, shape, torch.float32, 1)
                    x = wrap(local_of(value, src, named, rank), src, shape)
                    split += len(plan(src, dst, shape, torch.float32, topology=topology).steps) > 1
                    found = reshard(x, dst, topology=topology).to_local()
                    assert same_bits(found, local_of(changed(value, src, dst, named), dst, named, rank)), (
                        text,
                        topology,
                    )
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
    assert split


@pytest.mark.exhaustive
@pytest.mark.parametrize("named", [NAMED, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 8}], ids=str)
def test_other_collectives(pool, named):
    pool.run(with_other_collectives, named, ranks=4)


def over_more_axes(sizes, named):
    """dp, cp, tp and an axis of another name: added in this order, whatever the mesh's order."""
    mesh, rank, shape = ProcessMesh.grid(**sizes), dist.get_rank(), (8, 6)
    order = [axis for axis in ("dp", "cp", "tp", "x") if axis in sizes]
    addends = numbers(11, *(named.get(axis, sizes[axis]) for axis in order), *shape)
    truth = addends
    for _ in order:
        truth = tree_of(list(truth))
    coordinate = mesh.coordinate(rank)
    own = addends.permute(*(order.index(axis) for axis in sizes), len(order), len(order) + 1)
    for dim, axis in enumerate(sizes):
        fold = named.get(axis, sizes[axis]) // sizes[axis]
        own = own.narrow(dim, coordinate[axis] * fold, fold)
    own = own.reshape((*(size for size in own.shape[: len(order)] if size > 1), *shape))
    src = Layout(mesh, dict.fromkeys(sizes, Partial()))
    with exact_sums(named):
        for placements in ({}, {"dp": "S(0)"}, {"tp": "S(0)"}, {"tp": "S(1)", "dp": "S(0)"}):
            dst = Layout(mesh, {axis: placement for axis, placement in placements.items() if axis in sizes})
            found = reshard(wrap(own, src, shape), dst).to_local()
            assert same_bits(found, truth[dst.local_slices(shape, rank)]), placements


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes, named",
    [
        pytest.param({"dp": 2, "cp": 2, "tp": 1}, {"dp": 4, "cp": 2, "tp": 2}, id="cp-in-the-middle"),
        pytest.param({"x": 2, "tp": 2, "dp": 1}, {"dp": 4, "tp": 4}, id="an-axis-without-a-name"),
        pytest.param({"cp": 4, "dp": 1, "tp": 1}, {"dp": 8, "cp": 4, "tp": 2}, id="between-two-folded-axes"),
        pytest.param({"tp": 4, "x": 1, "dp": 1}, {"dp": 3, "tp": 4, "x": 5}, id="odd-folds"),
    ],
)
def test_more_axes(pool, sizes, named):
    pool.run(over_more_axes, sizes, named, ranks=4)


def replayed():
    """A recomputation repeats the result of a reshard on stacked addends without communication."""
    mesh, rank, received = ProcessMesh.grid(dp=2, tp=1), dist.get_rank(), []
    src, dst = Layout(mesh, "dp: P, tp: P"), Layout(mesh, "dp: S(0)")
    with exact_sums(NAMED):
        value = value_of(src, NAMED, (4, 4), torch.float32, 1)
        x = wrap(local_of(value, src, NAMED, rank), src, (4, 4))
        with record_received(lambda: received.append):
            first = reshard(x, dst).to_local()
        with replay_received(lambda: received[0]), Collectives() as seen:
            second = reshard(x, dst).to_local()
    assert len(received) == 1 and seen.kinds == [] and same_bits(first, second)


def test_recomputation(pool):
    pool.run(replayed, ranks=2)


def compiled():
    mesh = ProcessMesh.grid(dp=1)
    with exact_sums({"dp": 4}):
        x = distribute(torch.ones(3), Layout(mesh, "dp: P"))
        with pytest.raises(Exception, match="add stacked addends, which compiled code cannot"):
            torch.compile(lambda x: reshard(x, placements="dp: R"), backend="eager")(x)
    with exact_sums({"dp": 1}):
        x = distribute(torch.ones(3), Layout(mesh, "dp: P"))
        assert (
            torch.compile(lambda x: reshard(x, placements="dp: R"), backend="eager")(x).to_local().tolist() == [1] * 3
        )


def test_compiled_code_is_refused_where_addends_are_stacked(pool):
    pool.run(compiled, ranks=1)
