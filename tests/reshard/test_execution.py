"""reshard on 2 to 8 processes: every kind of step, dtype and memory layout; overlap; limits; bad input."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh
from weft.reshard import (
    Exchange,
    Link,
    Permute,
    ReduceExchange,
    Topology,
    distribute,
    layout_of,
    plan,
    reshard,
    start_reshard,
    to_global,
)
from weft.reshard.moving.dtensor import wrap
from weft.reshard.world.groups import device_mesh

from tests.support.collectives import Collectives
from tests.support.events import Events
from tests.support.pool import RanksFailed
from tests.support.shards import every_layout, rebuild, split, whole_of

GRID = ProcessMesh.grid(dp=2, tp=2)
CUBE = ProcessMesh.grid(pp=2, dp=2, tp=2)
SLOW_OUTER = Topology({"pp": Link(1e-4, 1e8), "dp": Link(1e-5, 1e9), "tp": Link(1e-6, 1e10)})


def part(whole, layout):
    return wrap(split(whole, layout)[dist.get_rank()], layout, whole.shape)


def holds(dtensor, whole, layout):
    assert str(layout_of(dtensor)) == str(Layout(layout_of(dtensor).mesh, str(layout)))
    mine = split(whole, layout)[dist.get_rank()]
    assert torch.equal(dtensor.to_local(), mine), (str(layout), dtensor.to_local(), mine)


SAMPLES = [
    ((8, 8), {}),
    ((7, 5), {}),
    ((3, 2, 5), {}),
    ((0, 8), {}),
    ((8, 8), {"topology": SLOW_OUTER}),
    ((7, 5), {"topology": SLOW_OUTER}),
]


def sample(mesh, count, portion):
    """Pairs of layouts of each kind, which share process groups; returns the results whose target is Partial."""
    results = []
    for seed, (shape, options) in enumerate(SAMPLES):
        whole = whole_of(shape, torch.float64)
        pairs = list(itertools.product(every_layout(mesh, len(shape)), repeat=2))
        for src, dst in portion.of(random.Random(seed).sample(pairs, count), every=10):
            y = reshard(part(whole, src), placements=dst, **options)
            if dst.is_partial():
                results.append((shape, dst, f"{shape} {src} -> {dst} {options}", y.to_local()))
            else:
                holds(y, whole, dst)
    return results


@pytest.mark.exhaustive
def test_a_sample_of_pairs_on_eight_ranks(pool, portion):
    """Even and uneven shards, empty ones, no elements; with and without a slow axis."""
    for same in zip(*pool.run(sample, CUBE, 40, portion, ranks=8), strict=True):
        parts = {rank: local for rank, (*_, local) in enumerate(same)}
        shape, dst, told, _ = same[0]
        assert torch.equal(rebuild(parts, dst, shape), whole_of(shape, torch.float64)), told


def every_dtype():
    """All dtypes are exchanged; dtypes with sums and further reductions are reduced, too."""
    moves = [
        ("dp: S(0)", "tp: S(0)", Exchange),
        ("dp: S(0), tp: S(1)", "dp: S(1), tp: S(0)", Permute),
        ("dp: S(0), tp: P", "dp: S(1), tp: S(0)", ReduceExchange),
    ]
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32, torch.int8)
    for src, dst, kind in moves:
        src, dst = Layout(GRID, src), Layout(GRID, dst)
        for dtype in (*dtypes, torch.uint8, torch.bool):
            if dtype in (torch.uint8, torch.bool) and src.is_partial():
                continue  # addends below 0
            assert kind in [type(step) for step in plan(src, dst, (6, 4), dtype).steps]
            whole = whole_of((6, 4), torch.float64).abs().to(dtype)
            holds(reshard(part(whole, src), placements=dst), whole, dst)
    for op in ("max", "min", "product"):
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16):
            whole = whole_of((6, 4), torch.float64).abs().to(dtype)
            for dst in ("", "tp: S(0)", "dp: S(1)"):
                holds(
                    reshard(distribute(whole, Layout(GRID, f"tp: P({op})")), placements=dst), whole, Layout(GRID, dst)
                )


def memory_in_any_order():
    whole = whole_of((6, 8), torch.float64)
    layout = Layout(GRID, "dp: S(0), tp: S(1)")
    mine = split(whole, layout)[dist.get_rank()]
    padded = torch.zeros(6, 8, dtype=whole.dtype)
    padded[1 : 1 + mine.shape[0], 2 : 2 + mine.shape[1]] = mine
    for local in (mine.t().contiguous().t(), padded[1 : 1 + mine.shape[0], 2 : 2 + mine.shape[1]]):
        assert not local.is_contiguous()
        for dst in every_layout(GRID, 2, [Partial("sum")]):
            y = reshard(wrap(local, layout, whole.shape), placements=dst)
            assert torch.equal(to_global(y), whole), str(dst)
    x = wrap(mine[:1, :1].expand(mine.shape), layout, whole.shape)  # stride 0
    assert to_global(x).shape == whole.shape


def gathered_and_scattered_by_exchange():
    """gloo's own reduce-scatter sends the whole tensor to all ranks, and its all-gather is slower."""
    whole = whole_of((6, 4), torch.float64)
    for src, dst, kind in [("tp: P", "tp: S(0)", "reduce-scatter"), ("tp: S(0)", "", "all-gather")]:
        src, dst = Layout(GRID, src), Layout(GRID, dst)
        with Collectives() as seen:
            y = reshard(part(whole, src), placements=dst)
        assert (seen.names, seen.kinds) == (["alltoall_base_"], [kind])
        holds(y, whole, dst)


def started_and_waited_for():
    """The collective runs from the start on; the result is the same, and gradients flow."""
    whole = whole_of((6, 8), torch.float64)
    x = part(whole, Layout(GRID, "dp: S(0), tp: S(1)")).requires_grad_()
    with Collectives() as seen:
        under_way = start_reshard(x)
    assert seen.kinds == ["all-gather"]
    with Collectives() as seen:
        y = under_way.wait()
        assert torch.equal(under_way.wait().to_local(), y.to_local())
    assert seen.kinds == []
    holds(y.detach(), whole, Layout(GRID))
    (grad,) = torch.autograd.grad(y, x, part(whole + 1, Layout(GRID)))
    holds(grad, whole + 1, Layout(GRID, "dp: S(0), tp: S(1)"))


class Doubled(torch.autograd.Function):
    """Doubles its input, and records when its forward and its backward run."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("doubled")
        return wrap(x.to_local() * 2, layout_of(x), x.shape)

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("doubled backward")
        return wrap(grad.to_local() * 2, layout_of(grad), grad.shape), None


def overlapped_in_backward():
    """An op between start and wait has its backward between the start and the wait of the gradient's reshard."""
    whole, src = whole_of((6, 8), torch.float64), Layout(GRID, "dp: S(0), tp: S(1)")
    x, other = part(whole, src).requires_grad_(), part(whole, Layout(GRID)).requires_grad_()
    with Events() as seen:
        under_way = start_reshard(x)
        between = Doubled.apply(other, seen.events)
        y = under_way.wait()
        assert seen.events == ["all-gather", "doubled", "waited"]
        seen.events.clear()
        torch.autograd.backward(
            [y, between], [part(whole, Layout(GRID, "dp: P(sum), tp: R")), part(whole, Layout(GRID))]
        )
    assert seen.events == ["reduce-scatter", "doubled backward", "waited"]
    holds(x.grad, whole, src)
    holds(other.grad, 2 * whole, Layout(GRID))
    z = start_reshard(x).wait()  # twice differentiable
    (grad,) = torch.autograd.grad(z * z * z, x, part(torch.ones_like(whole), Layout(GRID)), create_graph=True)
    (second,) = torch.autograd.grad(grad, x, part(torch.ones_like(whole), src))
    holds(second, 6 * whole, src)


def within_a_limit():
    src, dst = Layout(GRID, "dp: S(0), tp: S(1)"), Layout(GRID, "tp: S(0)")
    whole = whole_of((16, 16), torch.float64)
    free = plan(src, dst, whole.shape, whole.dtype)
    limit = free.peak_bytes - 1
    tight = plan(src, dst, whole.shape, whole.dtype, memory_limit=limit)
    assert tight.steps != free.steps
    x = part(whole, src).requires_grad_()
    y = reshard(x, placements=dst, memory_limit=limit)
    holds(y.detach(), whole, dst)
    with pytest.raises(LayoutError, match=r"memory_limit=64 bytes a rank; the leanest found needs"):
        reshard(x, placements=dst, memory_limit=64)


def twice_differentiable_across():
    far = ProcessMesh.grid(tp=2, first_rank=2)
    whole = whole_of((5, 3), torch.float64)
    x = distribute(whole, Layout(ProcessMesh.grid(tp=2), "tp: S(0)")).requires_grad_()
    y = reshard(x, far, "tp: S(1)")
    ones = distribute(torch.ones_like(whole), Layout(far, "tp: S(1)"))
    (grad,) = torch.autograd.grad(y * y * y, x, ones, create_graph=True)
    (second,) = torch.autograd.grad(grad, x, distribute(torch.ones_like(whole), layout_of(x)))
    if dist.get_rank() < 2:
        assert torch.equal(grad.to_local(), (3 * whole**2).chunk(2)[dist.get_rank()])
        assert torch.equal(second.to_local(), (6 * whole).chunk(2)[dist.get_rank()])


def bad_input():
    """Each is refused on every rank before anything is started."""
    whole = whole_of((4, 4), torch.float64)
    x = distribute(whole, Layout(GRID, "dp: S(0)"))
    with Collectives() as seen:
        with pytest.raises(ValueError, match=r"names rank 9, but the world has 4 processes \(0 to 3\)"):
            reshard(x, ProcessMesh([8, 9], ["tp"]), "tp: S(0)")
        with pytest.raises(LayoutError, match=r"mixes the reductions \['max', 'sum'\]"):
            reshard(x, placements="dp: P(sum), tp: P(max)")
        with pytest.raises(LayoutError, match=r"averages torch.int64"):
            reshard(distribute(whole.long(), Layout(GRID)), placements="tp: P(avg)")
        with pytest.raises(LayoutError, match=r"sums torch.bool.*use Partial\('max'\)"):
            reshard(distribute(whole.bool(), Layout(GRID)), placements="tp: P(sum)")
        with pytest.raises(LayoutError, match=r"takes the max of torch.complex64, which has no order"):
            reshard(distribute(whole.to(torch.complex64), Layout(GRID)), placements="tp: P(max)")
        wrong = DTensor.from_local(whole[:3], device_mesh(GRID, "cpu"), [TorchShard(0), TorchShard(0)], run_check=False)
        lost = wrap(wrong.to_local(), Layout(GRID, "dp: S(0)"), (4, 4))
        with pytest.raises(
            LayoutError, match=r"holds \(3, 4\), but \(dp: S\(0\), tp: R\) of \(4, 4\) gives it \(2, 4\)"
        ):
            reshard(lost, placements="")
    assert seen.kinds == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "function",
    [
        every_dtype,
        memory_in_any_order,
        gathered_and_scattered_by_exchange,
        started_and_waited_for,
        overlapped_in_backward,
        within_a_limit,
        twice_differentiable_across,
        bad_input,
    ],
)
def test_processes(pool, function):
    pool.run(function, ranks=4)


def one_rank_stays_away():
    x = distribute(whole_of((4, 4), torch.float64), Layout(GRID, "dp: S(0)"))
    if dist.get_rank() == 2:
        raise RuntimeError("this one went away")
    reshard(x)


@pytest.mark.exhaustive
def test_a_rank_that_is_missing_fails_the_others(pool):
    """The remaining ranks fail when their connections break, not at the time limit, and say so."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(one_rank_stays_away, ranks=4)
    assert "this one went away" in str(failed.value)
