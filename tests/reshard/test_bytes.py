"""How many bytes plans receive: against lower bounds derived here by intervals, and against the published ones."""

import itertools
import math
import time

import pytest
import torch
from weft.mesh import Layout, Partial, ProcessMesh
from weft.mesh.process_mesh import ProcessMesh as Mesh
from weft.reshard import AllGather, AllReduce, Link, ReduceScatter, Slice, Topology, plan
from weft.reshard.planning.exchange import messages_of

from tests.support.limits import python_ratio, python_seconds
from tests.support.shards import every_layout, pairs_of

F32 = torch.float32


def interval(mesh, layout, dim, size, coordinate):
    """The interval of [0, size) that nested halving, thirding, … leads to, for sizes that divide evenly."""
    start = 0
    for axis in layout.shard_order.get(dim, ()):
        size //= mesh.axis_size(axis)
        start += coordinate[axis] * size
    return start, start + size


def needed_and_not_held(src, dst, shape):
    """The number of elements that the busiest rank needs and does not hold, found by asking every rank."""
    mesh, most = src.mesh, 0
    for index in itertools.product(*(range(size) for size in mesh.shape)):
        coordinate = dict(zip(mesh.axis_names, index, strict=True))
        need = [interval(mesh, dst, dim, size, coordinate) for dim, size in enumerate(shape)]
        hold = [interval(mesh, src, dim, size, coordinate) for dim, size in enumerate(shape)]
        both = [max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(need, hold, strict=True)]
        most = max(most, math.prod(b - a for a, b in need) - math.prod(both))
    return most


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sizes, ndim, every",
    [
        pytest.param((2, 2), 2, 1, id="2x2"),
        pytest.param((2, 2), 3, 1, id="2x2-cube"),
        pytest.param((2, 2, 2), 2, 1, id="2x2x2"),
        pytest.param((2, 2, 2), 3, 3, id="2x2x2-cube"),
        pytest.param((2, 2, 2, 2), 2, 29, id="2x2x2x2"),
        pytest.param((2, 2, 2, 2), 3, 211, id="2x2x2x2-cube"),
        pytest.param((4, 4, 4), 2, 7, id="4x4x4"),
        pytest.param((4, 4, 4), 3, 13, id="4x4x4-cube"),
    ],
)
def test_every_plan_reaches_the_lower_bound(portion, sizes, ndim, every):
    """Ratio 1.00 for {R, S0, S1, S2} in all shard orders, up to the numbering of dims.

    Of many pairs every n-th is tried.
    """
    mesh = ProcessMesh.grid(**dict(zip("abcd", sizes, strict=False)))
    shape = (64,) * ndim
    layouts = every_layout(mesh, ndim, partials=())
    for src, dst in portion.of(pairs_of(layouts)[::every], every=60):
        made = plan(src, dst, shape, F32)
        bound = 4 * needed_and_not_held(src, dst, shape)
        assert made.max_received_bytes == bound == made.lower_bound_bytes, str(made)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (4, 4), (2, 2, 2)], ids=str)
def test_partial_stays_within_the_published_bounds(portion, sizes):
    """The bounds: a reduce-scatter of (p - 1) / p of the addends and the rest's bound; for all-reduces 2 (p - 1) / p.

    Rabenseifner (2004) and Patarasu and Yuan (2009): no reduce-scatter, and no all-reduce, receives less.
    """
    mesh, shape = ProcessMesh.grid(**dict(zip("abc", sizes, strict=False))), (64, 64)
    layouts = every_layout(mesh, 2)
    partial, whole = ([x for x in layouts if x.is_partial() == kind] for kind in (True, False))
    for src, dst in portion.of(itertools.product(partial, whole), every=15):
        made = plan(src, dst, shape, F32)
        reduced = [a for a in mesh.axis_names if isinstance(src[a], Partial)]
        p = math.prod(mesh.axis_size(axis) for axis in reduced)
        addends = math.prod(src.local_shape(shape, 0))
        need = math.prod(dst.local_shape(shape, 0))
        assert made.max_received_bytes <= 4 * ((p - 1) * addends // p + need), str(made)
        rest = {a: (src[a], dst[a]) for a in mesh.axis_names if a not in reduced}
        if all(before == after for before, after in rest.values()) and src.spec == dst.spec:
            assert made.max_received_bytes <= 4 * 2 * (p - 1) * addends // p


def test_an_all_reduce_of_what_others_hold_too_receives_less():
    """(P, R) -> (R, R) on 4x4: each of the four replicas reduces a quarter: 18/16 of the tensor, not 24/16."""
    mesh = ProcessMesh.grid(a=4, b=4)
    made = plan(Layout(mesh, "a: P"), Layout(mesh), (64, 64), F32)
    assert isinstance(made.steps[0], Slice)
    assert isinstance(made.steps[-1], AllGather)
    assert made.max_received_bytes == made.lower_bound_bytes == 4 * 64 * 64 * 18 // 16
    alone = ProcessMesh.grid(a=4)
    assert plan(Layout(alone, "a: P"), Layout(alone), (64, 64), F32).steps == (AllReduce("a"),)


NODES = Topology({"node": Link(5e-6, 25e9), "gpu": Link(2e-6, 400e9)})


class TestASlowOuterAxis:
    """Two nodes of four ranks. A node receives the elements which the node's ranks need, and which none of them has."""

    mesh = ProcessMesh.grid(node=2, gpu=4)
    shape = (4096, 4096)
    whole = 4 * 4096 * 4096

    def test_a_gather_takes_the_slow_axis_first(self):
        made = plan(Layout(self.mesh, "node: S(0), gpu: S(0)"), Layout(self.mesh), self.shape, F32, topology=NODES)
        assert made.steps == (AllGather(("node", "gpu"), (0, 0), apart=("node", "gpu")),)
        # One part over the slow axis, an eighth for each of four ranks: half the tensor enters the node, which is its
        # bound.
        assert made.max_received_bytes == self.whole * 7 // 8
        slow, fast = self.whole // 8, 3 * self.whole // 4
        assert made.seconds == pytest.approx(5e-6 + slow / 25e9 + 3 * 2e-6 + fast / 400e9)

    def test_a_reduction_takes_the_fast_axis_first(self):
        made = plan(Layout(self.mesh, "node: P, gpu: P"), Layout(self.mesh), self.shape, F32, topology=NODES)
        assert made.steps == (
            ReduceScatter(("node", "gpu"), (0, 0), apart=("gpu", "node")),
            AllGather(("node", "gpu"), (0, 0), apart=("node", "gpu")),
        )

    def test_an_exchange_takes_what_the_node_holds_from_the_node(self):
        src, dst = Layout(self.mesh, "gpu: S(0)"), Layout(self.mesh, "gpu: S(1)")
        for rank in self.mesh.ranks:
            node = rank // 4
            assert all(sender // 4 == node for sender, _ in messages_of(src, dst, self.shape, rank).receives)

    def test_latency_decides_for_small_tensors(self):
        far = Topology({"node": Link(1.0, 1e12), "gpu": Link(1e-9, 1e12)})
        near = plan(Layout(self.mesh, "node: S(0), gpu: S(0)"), Layout(self.mesh), (8, 8), F32, topology=far)
        assert near.steps == (AllGather(("node", "gpu"), (0, 0), apart=("node", "gpu")),)
        assert near.seconds == pytest.approx(1.0, rel=1e-3)


def test_a_memory_limit_makes_the_plan_another():
    """An exchange packs a copy for each receiver: a smaller exchange, then gathers, holds less at once."""
    mesh = ProcessMesh.grid(a=4, b=4)
    src, dst = Layout(mesh, "a: S(0), b: S(1)"), Layout(mesh, "b: S(0)")
    free = plan(src, dst, (64, 64), F32)
    tight = plan(src, dst, (64, 64), F32, memory_limit=free.peak_bytes - 1)
    assert tight.peak_bytes < free.peak_bytes
    assert tight.steps != free.steps
    with pytest.raises(ValueError, match=r"memory_limit=100 bytes a rank; the leanest found needs \d+"):
        plan(src, dst, (64, 64), F32, memory_limit=100)


@pytest.mark.parametrize(
    "sizes, limit",
    [
        pytest.param((2, 2, 2), 1, id="8-ranks"),
        pytest.param((64, 64, 32), 1, id="131072-ranks"),
        pytest.param((2, 2, 2, 2, 2), 20, id="five-axes"),
        pytest.param((16, 16, 8, 8, 8), 20, id="five-axes-131072-ranks"),
    ],
)
def test_a_new_plan_is_made_in_a_millisecond(sizes, limit):
    """The size of the mesh does not matter; a cached plan is found in microseconds.

    limit: in units of `python_seconds`, of about a millisecond.
    """
    mesh = ProcessMesh.grid(**dict(zip("abcde", sizes, strict=False)))
    ends = itertools.cycle(["S(0)", "S(1)", "R", "P", "S(2)"])
    taken, units = [], []
    for offset in range(9):
        texts = []
        for _ in range(2):
            texts.append(", ".join(f"{axis}: {next(ends)}" for axis in mesh.axis_names))
            next(ends)
        src, dst = Layout(mesh, texts[0]), Layout(mesh, texts[1])
        shape = (4096 + offset, 4096, 512)
        start = time.thread_time()  # which does not go on while another program has the core
        plan(src, dst, shape, F32)
        taken.append(time.thread_time() - start)
        units.append(python_seconds())
    assert sorted(taken)[len(taken) // 2] < limit * sorted(units)[len(units) // 2], (taken, units)
    assert python_ratio(lambda: [plan(src, dst, shape, F32) for _ in range(100)], rounds=20) < 100 * 0.005


def test_a_plan_knows_nothing_of_the_meshes_before_it():
    """Meshes and layouts are equal by content, so equal requests get the same plan object."""
    a = plan(Layout(ProcessMesh.grid(x=2, y=2), "x: S(0)"), Layout(ProcessMesh.grid(x=2, y=2), "y: S(1)"), (8, 8), F32)
    Mesh.grid(z=7)
    b = plan(Layout(Mesh([[0, 1], [2, 3]], ["x", "y"]), "x: S(0)"), Layout(Mesh.grid(x=2, y=2), "y: S(1)"), (8, 8), F32)
    assert a is b
