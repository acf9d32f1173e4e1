"""From any layout on one mesh to any on another: simulated on integers, run on processes, bytes and senders counted."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from weft.mesh import Layout, Partial, ProcessMesh, Replicate
from weft.mesh.layout import volume
from weft.reshard import (
    AllGather,
    Exchange,
    MakePartial,
    ReduceScatter,
    Relabel,
    distribute,
    layout_of,
    plan,
    reshard,
    simulate,
)
from weft.reshard.moving.dtensor import wrap
from weft.reshard.planning.exchange import messages_of

from tests.support.collectives import Collectives
from tests.support.search import searched
from tests.support.shards import every_layout, rebuild, split, whole_of

PAIR = ProcessMesh.grid(tp=2)
MESHES = [
    pytest.param(PAIR, ProcessMesh.grid(tp=2, first_rank=2), id="disjoint"),
    pytest.param(PAIR, ProcessMesh([1, 0], ["tp"]), id="turned"),
    pytest.param(PAIR, ProcessMesh.grid(dp=2), id="renamed"),
    pytest.param(PAIR, ProcessMesh([1, 2], ["tp"]), id="overlapping"),
    pytest.param(PAIR, ProcessMesh.grid(tp=3, first_rank=1), id="more-ranks"),
    pytest.param(ProcessMesh.grid(tp=3), ProcessMesh([0], ["tp"]), id="to-one-rank"),
    pytest.param(ProcessMesh.grid(tp=4), ProcessMesh.grid(dp=2, tp=2), id="another-shape"),
    pytest.param(ProcessMesh.grid(dp=2, tp=2), ProcessMesh.grid(tp=4, first_rank=4), id="2x2-to-4"),
    pytest.param(ProcessMesh.grid(dp=2, tp=2), ProcessMesh([[3, 1], [2, 0]], ["dp", "tp"]), id="2x2-turned"),
    pytest.param(ProcessMesh.grid(dp=2, tp=2), ProcessMesh.grid(a=2, b=3, first_rank=2), id="2x2-to-2x3"),
]


def unsummed(layout):
    return layout.replace(**{axis: Replicate() for axis in layout.mesh.axis_names if isinstance(layout[axis], Partial)})


@pytest.mark.parametrize("a, b", MESHES)
def test_every_pair_across(portion, a, b):
    shapes = itertools.cycle([(7, 5), (4, 4), (1, 6), (0, 3), (3, 8)])
    pairs = itertools.product(every_layout(a, 2), every_layout(b, 2))
    for shape, (src, dst) in portion.of(zip(shapes, pairs, strict=False), every=4):
        made = plan(src, dst, shape, torch.int64)
        whole = whole_of(shape)
        assert torch.equal(rebuild(simulate(made, split(whole, src)), dst, shape), whole), str(made)
        assert made.lower_bound_bytes <= made.max_received_bytes, str(made)


@searched(st.data())
def test_any_two_meshes(data):
    """Ranks in any order, in any shape, with any overlap; there and back is the identity where nothing is Partial."""
    meshes = []
    for _ in range(2):
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        ranks = data.draw(st.permutations(range(30)))[: torch.Size(sizes).numel()]
        meshes.append(ProcessMesh(torch.tensor(ranks).reshape(sizes), ["x", "y", "z"][: len(sizes)]))
    shape = tuple(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    options = ["R", "P(sum)", *(f"S({dim})" for dim in range(len(shape)))]
    src, dst = (Layout(mesh, [data.draw(st.sampled_from(options)) for _ in mesh.shape]) for mesh in meshes)
    whole = whole_of(shape)
    there = simulate(plan(src, dst, shape, whole.dtype), split(whole, src))
    assert torch.equal(rebuild(there, dst, shape), whole)
    back = simulate(plan(dst, unsummed(src), shape, whole.dtype), there)
    assert torch.equal(rebuild(back, unsummed(src), shape), whole)


def test_partial_is_reduced_where_it_is():
    src, dst = Layout(PAIR, "tp: P"), Layout(ProcessMesh.grid(tp=2, first_rank=2), "tp: S(0)")
    made = plan(src, dst, (8, 8), torch.float32)
    assert made.steps == (ReduceScatter("tp", 0), Exchange(dst))
    assert made.received_bytes(0) == made.received_bytes(1) == 4 * 32
    assert made.received_bytes(2) == made.received_bytes(3) == 4 * 32


def test_each_byte_crosses_once_and_is_spread_at_its_destination():
    far = ProcessMesh.grid(dp=2, tp=4, first_rank=8)
    src, dst = Layout(ProcessMesh.grid(tp=2), "tp: S(0)"), Layout(far)
    made = plan(src, dst, (8, 8), torch.float32)
    first, spread = made.steps
    assert isinstance(first, Exchange)
    assert spread == AllGather(("dp", "tp"), spread.dim)
    crossing = [messages_of(src, first.target, (8, 8), rank).received_elements for rank in far.ranks]
    assert crossing == [8] * 8
    assert made.received_bytes(8) == 4 * 64


def test_the_least_loaded_holder_sends():
    """Four ranks hold the whole tensor; each sends a quarter."""
    src, dst = Layout(ProcessMesh.grid(tp=4)), Layout(ProcessMesh.grid(tp=4, first_rank=4), "tp: S(0)")
    sent = [messages_of(src, dst, (8, 8), rank).sends for rank in range(4)]
    assert [sum(volume(box) for _, box in sends) for sends in sent] == [16] * 4


def test_ranks_in_both_meshes_keep_what_they_hold():
    """The same two halves under other names: nothing moves, and no collective is started."""
    src, dst = Layout(ProcessMesh.grid(tp=4), "tp: S(0)"), Layout(ProcessMesh.grid(a=2, b=2), "a: S(0), b: S(0)")
    made = plan(src, dst, (8, 3), torch.float32)
    assert made.steps == (Relabel(dst),)
    assert made.max_received_bytes == 0
    grown = plan(Layout(PAIR, "tp: S(0)"), Layout(ProcessMesh.grid(tp=3), "tp: R"), (6, 2), torch.float32)
    assert [grown.received_bytes(rank) for rank in range(3)] == [4 * 6, 4 * 6, 4 * 12]
    assert grown.max_received_bytes == grown.lower_bound_bytes


def test_a_partial_target_holds_its_value_at_index_0():
    dst = Layout(ProcessMesh.grid(tp=2, first_rank=2), "tp: P")
    made = plan(Layout(PAIR, "tp: S(0)"), dst, (4,), torch.int64)
    assert made.steps[-1] == MakePartial("tp")
    results = simulate(made, split(whole_of((4,)), Layout(PAIR, "tp: S(0)")))
    assert results[2].tolist() == whole_of((4,)).tolist()
    assert results[3].tolist() == [0] * 4


def every_pair_on_processes(a, b, shape, portion):
    """Values, metadata and gradients of every pair; ranks outside a mesh hold 0 bytes of it and start nothing."""
    whole, cotangent = whole_of(shape, torch.float64), whole_of(shape, torch.float64) + 3
    rank = dist.get_rank()

    def part(tensor, layout):
        return wrap(split(tensor, layout)[rank] if rank in layout.mesh else tensor.new_empty(0), layout, shape)

    def holds(tensor, value, layout):
        assert (tensor.shape, tensor.dtype, str(layout_of(tensor))) == (value.shape, value.dtype, str(layout))
        if rank not in layout.mesh:
            assert tensor.to_local().nbytes == 0
        elif not layout.is_partial():
            assert torch.equal(tensor.to_local(), split(value, layout)[rank]), (str(layout), tensor.to_local())

    results = []
    for src, dst in portion.of(itertools.product(every_layout(a, len(shape)), every_layout(b, len(shape))), every=4):
        if list(itertools.chain(*src.spec)) != [x for x in a.axis_names if x in itertools.chain(*src.spec)]:
            continue
        if list(itertools.chain(*dst.spec)) != [x for x in b.axis_names if x in itertools.chain(*dst.spec)]:
            continue
        x = part(whole, src).requires_grad_()
        with Collectives() as seen:
            y = reshard(x, b, dst)
        if rank not in a and rank not in b:
            assert seen.kinds == []
        holds(y.detach(), whole, dst)
        if dst.is_partial():
            results.append((dst, y.to_local().detach()))
        (grad,) = torch.autograd.grad(y, x, part(cotangent, unsummed(dst)))
        holds(grad, cotangent, unsummed(src))
    return results


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "a, b, shape, ranks",
    [
        pytest.param(PAIR, ProcessMesh.grid(tp=2, first_rank=2), (7, 5), 5, id="disjoint-and-a-rank-outside-both"),
        pytest.param(PAIR, ProcessMesh([1, 2], ["tp"]), (5, 3), 4, id="overlapping"),
        pytest.param(PAIR, ProcessMesh([1, 0], ["tp"]), (5, 3), 2, id="turned"),
        pytest.param(ProcessMesh.grid(tp=4), ProcessMesh.grid(a=2, b=2), (5, 3), 4, id="another-shape"),
        pytest.param(
            ProcessMesh.grid(dp=2, tp=2),
            ProcessMesh.grid(tp=4, first_rank=4),
            (6, 5),
            8,
            id="2x2-to-4",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(ProcessMesh.grid(tp=3), ProcessMesh([3], ["x"]), (2, 3), 4, id="empty-shards-to-one-rank"),
    ],
)
def test_processes_across(pool, portion, a, b, shape, ranks):
    for same in zip(*pool.run(every_pair_on_processes, a, b, shape, portion, ranks=ranks), strict=True):
        parts = {rank: local for rank, (_, local) in enumerate(same)}
        assert torch.equal(rebuild(parts, same[0][0], shape), whole_of(shape, torch.float64))


def chained():
    """Two stages: forward over there and on, backward the way back, through an op on the second mesh."""
    first, second = PAIR, ProcessMesh.grid(tp=2, first_rank=2)
    whole = whole_of((6, 4), torch.float64)
    x = distribute(whole, Layout(first, "tp: S(0)")).requires_grad_()
    y = reshard(reshard(x, second, "tp: S(1)"), first, "tp: S(0)")
    (grad,) = torch.autograd.grad(y, x, distribute(whole + 1, Layout(first, "tp: S(0)")), create_graph=True)
    assert layout_of(grad) == layout_of(x)
    if dist.get_rank() in first:
        assert torch.equal(grad.to_local(), (whole + 1).chunk(2)[dist.get_rank()])
        assert torch.equal(y.to_local(), x.to_local())
    else:
        assert grad.to_local().nbytes == y.to_local().nbytes == 0


def test_there_and_back_over_another_mesh(pool):
    pool.run(chained, ranks=4)
