"""reshard on real processes: values, gradients and collectives, against slices of the whole tensor."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.reshard import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceExchange,
    ReduceScatter,
    distribute,
    layout_of,
    plan,
    reshard,
    to_global,
)
from weft.reshard.moving.dtensor import wrap

from tests.support.collectives import Collectives
from tests.support.pool import RanksFailed
from tests.support.shards import every_layout, rebuild, split, whole_of

LINE = ProcessMesh.grid(tp=2)
FOUR = ProcessMesh.grid(tp=4)
GRID = ProcessMesh.grid(dp=2, tp=2)
KINDS = {
    AllGather: "all-gather",
    AllReduce: "all-reduce",
    ReduceScatter: "reduce-scatter",
    **dict.fromkeys((AllToAll, Exchange, Permute, ReduceExchange), "all-to-all"),
}


def part(whole, layout):
    """This rank's part, as a DTensor."""
    return wrap(split(whole, layout)[dist.get_rank()], layout, whole.shape)


def holds(dtensor, whole, layout):
    """Asserts that this rank holds its part of `whole` in `layout`."""
    assert dtensor.shape == whole.shape
    assert str(layout_of(dtensor)) == str(Layout(layout_of(dtensor).mesh, str(layout)))
    mine = split(whole, layout)[dist.get_rank()]
    assert torch.equal(dtensor.to_local(), mine), (str(layout), dtensor.to_local(), mine)


def started(steps):
    """The collectives of the steps by purpose: a reduce-scatter counts as such even where an exchange performs it."""
    return [KINDS[type(step)] for step in steps if type(step) in KINDS]


def unsummed(layout):
    """`layout` with Replicate where it is Partial."""
    return layout.replace(**{axis: Replicate() for axis in layout.mesh.axis_names if isinstance(layout[axis], Partial)})


def every_pair(mesh, shape, partials, portion):
    """Forward and backward of every pair; returns this rank's results where the target is Partial."""
    whole, cotangent = whole_of(shape, torch.float64), whole_of(shape, torch.float64) + 3
    partial_results = []
    for src, dst in portion.of(itertools.product(every_layout(mesh, len(shape), partials), repeat=2), every=24):
        x = part(whole, src).requires_grad_()
        with Collectives() as seen:
            y = reshard(x, placements=dst)
        assert seen.kinds == started(plan(src, dst, shape, whole.dtype).steps), (str(src), str(dst))
        if dst.is_partial():
            partial_results.append((src, dst, y.to_local().detach()))
        else:
            holds(y.detach(), whole, dst)
        wanted, arriving = unsummed(src), unsummed(dst)
        with Collectives() as seen:
            (grad,) = torch.autograd.grad(y, x, part(cotangent, arriving))
        assert seen.kinds == started(plan(arriving, wanted, shape, whole.dtype).steps), (str(src), str(dst))
        holds(grad, cotangent, wanted)
    return partial_results


@pytest.mark.parametrize(
    "mesh, shape",
    [
        pytest.param(LINE, (7, 5), id="2-uneven"),
        pytest.param(FOUR, (7, 5), id="4-uneven"),
        pytest.param(FOUR, (5, 1), id="4-empty-shards"),
        pytest.param(FOUR, (0, 3), id="4-no-rows"),
        pytest.param(GRID, (7, 5), id="2x2-uneven"),
        pytest.param(GRID, (2, 3), id="2x2-empty-shards"),
        pytest.param(ProcessMesh([[2, 0], [1, 3]], ["dp", "tp"]), (3, 5), id="2x2-any-ranks"),
        pytest.param(ProcessMesh([2, 0, 1], ["tp"]), (7, 5), id="3-any-ranks"),  # the order is not its own inverse
    ],
)
def test_every_pair(pool, portion, mesh, shape):
    """Values and gradients are those of the whole tensor; the collectives are exactly the plan's steps."""
    results = pool.run(every_pair, mesh, shape, [Partial("sum")], portion, ranks=mesh.size)
    for same_pair in zip(*results, strict=True):
        (_, dst, _) = same_pair[0]
        parts = {rank: local for rank, (_, _, local) in enumerate(same_pair)}
        assert torch.equal(rebuild(parts, dst, shape), whole_of(shape, torch.float64)), tuple(
            map(str, same_pair[0][:2])
        )


@pytest.mark.parametrize("op", ["avg", "min", "max", "product"])
def test_every_reduction(pool, portion, op):
    results = pool.run(every_pair, FOUR, (6, 3), [Partial(op)], portion, ranks=4)
    for same_pair in zip(*results, strict=True):
        parts = {rank: local for rank, (_, _, local) in enumerate(same_pair)}
        assert torch.equal(rebuild(parts, same_pair[0][1], (6, 3)), whole_of((6, 3), torch.float64))


def one_reduction_while_another_begins():
    """A sum still to come would double the identity of a product."""
    x = part(whole_of((5, 3), torch.float64), Layout(GRID, "dp: P(sum)"))
    holds(
        reshard(reshard(x, placements="tp: P(product)"), placements=""), whole_of((5, 3), torch.float64), Layout(GRID)
    )


def every_dtype():
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.complex64):
        whole = whole_of((7, 5), torch.float64).abs().to(dtype)
        for src, dst in itertools.product(every_layout(FOUR, 2, partials=()), repeat=2):
            holds(reshard(part(whole, src), placements=dst), whole, dst)
    for dtype in (torch.int64, torch.int32, torch.bfloat16, torch.float16):
        whole = whole_of((7, 5), dtype)
        for dst in every_layout(FOUR, 2, partials=()):
            holds(reshard(part(whole, Layout(FOUR, "tp: P")), placements=dst), whole, dst)
            holds(reshard(distribute(whole, Layout(FOUR, "tp: P(max)")), placements=dst), whole, dst)


def arriving_partial():
    """A Partial gradient is reduced once, where it arrives, even if the forward moved nothing."""
    whole, cotangent = whole_of((7, 5), torch.float64), whole_of((7, 5), torch.float64) + 3
    for src, dst, kinds in [
        ("", "", ["all-reduce"]),  # where tensor parallelism's backward all-reduce lives
        ("tp: S(0)", "", ["reduce-scatter"]),
        ("tp: P", "", ["all-reduce"]),
        ("dp: S(0)", "dp: S(0)", ["all-reduce"]),
        ("dp: S(0), tp: S(0)", "dp: S(0)", ["reduce-scatter"]),
    ]:
        src, dst = Layout(GRID, src), Layout(GRID, dst)
        x = part(whole, src).requires_grad_()
        y = reshard(x, placements=dst)
        with Collectives() as seen:
            (grad,) = torch.autograd.grad(y, x, part(cotangent, dst.replace(tp=Partial())))
        assert seen.kinds == kinds, (str(src), seen.kinds)
        holds(grad, cotangent, unsummed(src))


def twice_differentiable():
    whole = whole_of((7, 5), torch.float64)
    for src in every_layout(GRID, 2, partials=()):
        x = part(whole, src).requires_grad_()
        y = reshard(x, GRID, "tp: S(1)")
        ones = part(torch.ones_like(whole), Layout(GRID, "tp: S(1)"))
        (grad,) = torch.autograd.grad(y * y * y, x, ones, create_graph=True)
        holds(grad.detach(), 3 * whole**2, src)
        (second,) = torch.autograd.grad(grad, x, part(torch.ones_like(whole), src))
        holds(second, 6 * whole, src)


def distributed_and_back():
    whole = whole_of((7, 5), torch.float64)
    for op in ("sum", "avg", "min", "max", "product"):
        for layout in every_layout(GRID, 2, [Partial(op)]):
            x = distribute(whole, layout)
            assert torch.equal(to_global(x), whole), str(layout)
            if not layout.is_partial():
                holds(x, whole, layout)
            if list(itertools.chain(*layout.spec)) in (["dp", "tp"], ["dp"], ["tp"], []):
                assert layout_of(x) == layout
    leaf = distribute(whole.requires_grad_(), Layout(GRID, "dp: S(0)"))
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.to_local().data_ptr() != whole.data_ptr()


def the_input_stays_as_it_was():
    """A received result is this rank's own memory; a result without communication may share the input's memory."""
    for src, dst in itertools.product(every_layout(LINE, 2), repeat=2):
        x = part(whole_of((4, 4), torch.float64), src)
        before = x.to_local().clone()
        if plan(src, dst, (4, 4), torch.float64).max_received_bytes:
            reshard(x, placements=dst).to_local().add_(1)
        assert torch.equal(x.to_local(), before), (str(src), str(dst))


def on_a_permuted_mesh():
    """The same ranks with the axes in another order: the result lies on the mesh asked for (pytorch 126795)."""
    whole, turned = whole_of((7, 5), torch.float64), GRID.permute("tp", "dp")
    for src, dst in itertools.product(every_layout(GRID, 2, partials=()), every_layout(turned, 2, partials=())):
        x = part(whole, src).requires_grad_()
        y = reshard(x, turned, dst)
        holds(y.detach(), whole, dst)
        assert set(layout_of(y).mesh.axis_names) == {"dp", "tp"}
        if not dst.spec:
            assert layout_of(y) == dst
        (grad,) = torch.autograd.grad(y, x, part(whole + 3, dst))
        holds(grad, whole + 3, src)
    x = distribute(whole, Layout(GRID, "dp: S(0)"))
    assert layout_of(reshard(x, turned, "dp: S(0)")) == Layout(turned, "dp: S(0)")
    assert layout_of(reshard(x, turned)) == Layout(turned)


def outside():
    """Ranks 1 and 2 hold the tensor; 0 and 3 hold its metadata, start nothing and take part in autograd."""
    mesh, whole = ProcessMesh([1, 2], ["tp"]), whole_of((5, 3), torch.float64)
    inside = dist.get_rank() in mesh
    for src, dst in itertools.product(every_layout(mesh, 2), repeat=2):
        x = distribute(whole, src).requires_grad_()
        with Collectives() as seen:
            y = reshard(x, placements=dst)
            (grad,) = torch.autograd.grad(y, x, distribute(whole, unsummed(dst)))
        for tensor, layout in ((x, src), (y, dst), (grad, unsummed(src))):
            assert (tensor.shape, tensor.dtype, layout_of(tensor)) == (whole.shape, whole.dtype, layout)
            assert inside or tensor.to_local().nbytes == 0
        if inside:
            holds(grad, whole, unsummed(src))
        else:
            assert seen.kinds == []
    return to_global(distribute(whole, Layout(mesh, "tp: S(0)")))


def torch_forms():
    """torch's meshes and placements, with and without names, and DTensors that torch made."""
    whole = whole_of((7, 5), torch.float64)
    for names in (("dp", "tp"), None):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
        theirs = torch_tensor.distribute_tensor(whole, mesh, [torch_tensor.Shard(0), torch_tensor.Shard(0)])
        axes = names or ("axis0", "axis1")
        assert layout_of(theirs) == Layout(ProcessMesh.grid(**dict.fromkeys(axes, 2)), [Shard(0), Shard(0)])
        ours = reshard(theirs, placements=[torch_tensor.Replicate(), torch_tensor.Shard(1)])
        assert ours.device_mesh == mesh
        assert ours.placements == (torch_tensor.Replicate(), torch_tensor.Shard(1))
        expected = torch_tensor.distribute_tensor(whole, mesh, [torch_tensor.Replicate(), torch_tensor.Shard(1)])
        assert torch.equal(ours.to_local(), expected.to_local())
        assert torch.equal(reshard(theirs, mesh, {axes[1]: Shard(1)}).full_tensor(), whole)
        sub = distribute(whole, Layout(ProcessMesh.grid(x=4), "x: S(0)"))
        assert sub.full_tensor().equal(whole)


def bad_calls():
    x = distribute(whole_of((4, 4), torch.float64), Layout(LINE, "tp: S(0)"))
    with pytest.raises(LayoutError, match=r"reshard takes a DTensor, got Tensor; give it a layout with distribute\(\)"):
        reshard(x.to_local(), placements="")
    with pytest.raises(LayoutError, match="no axis 'dp'"):
        reshard(x, placements="dp: R")
    with pytest.raises(LayoutError, match="shards dim 2 of a tensor of shape"):
        reshard(x, placements="tp: S(2)")
    with pytest.raises(LayoutError, match="shards dim 2 of a tensor of shape"):
        distribute(whole_of((4, 4), torch.float64), Layout(LINE, "tp: S(2)"))
    with pytest.raises(ValueError, match=r"names rank 7, but the world has 2 processes \(0 to 1\)"):
        distribute(whole_of((4, 4), torch.float64), Layout(ProcessMesh([0, 7], ["tp"])))
    with pytest.raises(LayoutError, match=r"averages torch\.int64"):
        reshard(distribute(torch.arange(4), Layout(LINE)), placements="tp: P(avg)")


def uneven_all_gather():
    """Flattened gathers of uneven shards corrupt data (pytorch 194457): every dim, every order, several sizes."""
    for shape in [(5, 3), (3, 5), (1, 7), (2, 3, 5)]:
        whole = whole_of(shape, torch.float64)
        for layout in every_layout(GRID, len(shape), partials=()):
            assert torch.equal(to_global(distribute(whole, layout)), whole), str(layout)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "function, arguments, ranks",
    [
        pytest.param(one_reduction_while_another_begins, (), 4, id="one-reduction-while-another-begins"),
        pytest.param(every_dtype, (), 4, id="dtypes"),
        pytest.param(arriving_partial, (), 4, id="a-partial-gradient-is-reduced-once"),
        pytest.param(twice_differentiable, (), 4, id="twice-differentiable"),
        pytest.param(distributed_and_back, (), 4, id="distribute-and-to-global"),
        pytest.param(the_input_stays_as_it_was, (), 2, id="input-unchanged"),
        pytest.param(on_a_permuted_mesh, (), 4, id="pytorch-126795-permuted-mesh"),
        pytest.param(torch_forms, (), 4, id="torch-forms"),
        pytest.param(bad_calls, (), 2, id="bad-calls"),
        pytest.param(uneven_all_gather, (), 4, id="pytorch-194457-uneven-all-gather"),
    ],
)
def test_processes(pool, function, arguments, ranks):
    pool.run(function, *arguments, ranks=ranks)


def test_paddle_58126_ranks_outside_the_mesh(pool):
    results = pool.run(outside, ranks=4)
    assert torch.equal(results[1], whole_of((5, 3), torch.float64))
    assert torch.equal(results[2], whole_of((5, 3), torch.float64))
    assert results[0].numel() == results[3].numel() == 0


def test_without_a_process_group():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\)"):
        distribute(torch.ones(4), Layout(LINE, "tp: S(0)"))


def wrong_on_one_rank():
    holds(
        distribute(whole_of((4, 4), torch.float64), Layout(LINE, "tp: S(0)")),
        whole_of((4, 4), torch.float64) + dist.get_rank(),
        Layout(LINE, "tp: S(0)"),
    )


def test_the_checks_above_can_fail(pool):
    with pytest.raises(RanksFailed, match="1 of 2 ranks failed"):
        pool.run(wrong_on_one_rank, ranks=2)


def layouts_on_device_meshes():
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2,))
    return Layout(named, "dp: S(0)"), Layout(unnamed, [Shard(1)])


def test_a_device_mesh_is_taken_for_a_mesh(pool):
    for named, unnamed in pool.run(layouts_on_device_meshes, ranks=2):
        assert named == Layout(ProcessMesh.grid(dp=2, tp=1), "dp: S(0)")
        assert unnamed == Layout(ProcessMesh.grid(axis0=2), "axis0: S(1)")
    with pytest.raises(ValueError, match=r"'tp' is not a mesh; give a ProcessMesh or a DeviceMesh"):
        Layout("tp", "tp: S(0)")
