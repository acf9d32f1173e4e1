"""Reported failures of layout changes in torch and Paddle: a test for each, named by the number of the report."""

import pytest
import torch
import torch.distributed as dist
from weft.kernels import add, swiglu
from weft.mesh import Layout, LayoutError, ProcessMesh, infer
from weft.reshard import distribute, layout_of, plan, reshard, simulate, to_global
from weft.reshard.moving.dtensor import wrap

from tests.support.shards import every_layout, split, whole_of

GRID = ProcessMesh.grid(dp=2, tp=2)
SIZES = range(10)


def uneven_flattened_gather():
    """Two axes that shard the same dim are gathered by a single collective, also where no axis divides the size."""
    for rows in SIZES:
        whole = whole_of((rows, 3), torch.float64)
        for text in ("dp: S(0), tp: S(0)", "tp: S(0), dp: S(0)", "dp: S(0), tp: S(1)"):
            assert torch.equal(to_global(distribute(whole, Layout(GRID, text))), whole), (rows, text)


def to_another_mesh():
    """The same placements on a second mesh: the tensor moves there, and ranks of the first mesh hold nothing."""
    near, far = ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=2, first_rank=2)
    whole = whole_of((4, 3), torch.float64)
    moved = reshard(distribute(whole, Layout(near, "tp: S(0)")), far, "tp: S(0)")
    assert layout_of(moved) == Layout(far, "tp: S(0)")
    rank = dist.get_rank()
    held = whole[2 * (rank - 2) : 2 * (rank - 1)] if rank in far else whole.new_empty(0)
    assert torch.equal(moved.to_local(), held)


def sizes_and_offsets_of_uneven_shards():
    """Local sizes are torch.chunk's, through every change there and back, and the whole is the whole."""
    for rows in SIZES:
        whole = whole_of((rows, 5), torch.float64)
        for src in every_layout(GRID, 2, partials=()):
            x = distribute(whole, src)
            assert torch.equal(x.to_local(), split(whole, src)[dist.get_rank()])
            y = reshard(x, placements="dp: S(1), tp: S(0)")
            assert torch.equal(y.to_local(), split(whole, Layout(GRID, "dp: S(1), tp: S(0)"))[dist.get_rank()])
            assert torch.equal(to_global(y), whole)


def what_a_partial_may_not_go_through():
    """A scalar is added to a Partial once; a non-linear op refuses a Partial, and is right after the named reshard."""
    whole = whole_of((4, 4), torch.float64)
    layout = Layout(ProcessMesh.grid(tp=4), "tp: P")
    x = distribute(whole, layout)
    one = distribute(torch.ones(4, 4, dtype=torch.float64), layout)
    assert torch.equal(to_global(add(x, one)), whole + 1)
    replicated = distribute(torch.ones(4, 4, dtype=torch.float64), Layout(layout.mesh))
    with pytest.raises(LayoutError, match="reshard"):
        add(x, replicated)  # every rank would add the replicated ones: the sum would have them once a rank
    with pytest.raises(LayoutError, match=r"swiglu: .* would not reduce to the result; reshard") as refused:
        swiglu(x, x)
    y = reshard(x, placements=refused.value.nearest[0])
    expected = torch.nn.functional.silu(whole) * whole
    assert torch.allclose(to_global(swiglu(y, y)), expected)


def reductions_of_a_partial():
    """Maximum and norm of a sum do not follow from the addends: both are computed after the reduction."""
    whole = whole_of((5, 3), torch.float64)
    x = distribute(whole, Layout(GRID, "dp: P, tp: S(0)"))
    reduced = to_global(reshard(x, placements="tp: S(0)"))
    assert reduced.max() == whole.max()
    assert reduced.norm() == whole.norm()
    with pytest.raises(LayoutError, match=r"max over .* would not reduce to the result; reshard"):
        infer.reduction("max", layout_of(x), (5, 3))
    with pytest.raises(LayoutError, match=r"norm: .* would not reduce to the result; reshard"):
        infer.whole("norm", "x", layout_of(x), (0, 1))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(uneven_flattened_gather, id="pytorch-194457"),
        pytest.param(to_another_mesh, id="pytorch-126795"),
        pytest.param(sizes_and_offsets_of_uneven_shards, id="pytorch-103306-144109-161368"),
        pytest.param(what_a_partial_may_not_go_through, id="pytorch-163193"),
        pytest.param(reductions_of_a_partial, id="pytorch-165962"),
    ],
)
def test_failure(pool, function):
    pool.run(function, ranks=4)


def averages():
    """Partial(avg) of a known tensor, over an axis and over two: gathered, and scattered in uneven parts."""
    for rows in (1, 5):
        whole = whole_of((rows, 3), torch.float64)
        for src in ("dp: P(avg)", "tp: P(avg), dp: S(1)", "dp: P(avg), tp: P(avg)"):
            layout = Layout(GRID, src)
            x = wrap(split(whole, layout)[dist.get_rank()], layout, whole.shape)
            for dst in ("", "dp: S(0)", "tp: S(1), dp: S(0)"):
                mine = split(whole, Layout(GRID, dst))[dist.get_rank()]
                assert torch.equal(reshard(x, placements=dst).to_local(), mine), (rows, src, dst)


def test_anchor_26_an_average_is_not_silently_a_sum(pool):
    """gloo has no average, and gave the sum instead (pytorch 162338)."""
    pool.run(averages, ranks=4)


def test_pytorch_165962_replicate_to_partial_is_not_divided():
    """A third of an integer is no integer, and three thirds of a bf16 are not the bf16."""
    mesh = ProcessMesh.grid(tp=3)
    for whole in (torch.tensor([1, 2, 7]), torch.tensor([0.1, -3.3, 7e30], dtype=torch.bfloat16)):
        there = simulate(plan(Layout(mesh), Layout(mesh, "tp: P"), (3,), whole.dtype), split(whole, Layout(mesh)))
        assert torch.equal(there[0], whole)
        assert all(part.dtype == whole.dtype and not part.any() for part in (there[1], there[2]))
        back = simulate(plan(Layout(mesh, "tp: P"), Layout(mesh), (3,), whole.dtype), there)
        assert all(torch.equal(part, whole) for part in back.values())


def test_paddle_balanced_split_of_5_over_4():
    """Paddle's BalancedSplit(5, 4) gave [2, 2, 2, -1]; a part is never negative."""
    layout = Layout(ProcessMesh.grid(tp=4), "tp: S(0)")
    assert [layout.local_shape((5,), rank)[0] for rank in range(4)] == [2, 2, 1, 0]
    results = simulate(plan(Layout(layout.mesh), layout, (5,), torch.int64), split(whole_of((5,)), Layout(layout.mesh)))
    assert [len(results[rank]) for rank in range(4)] == [2, 2, 1, 0]
