"""Inside `exact_sums`, a reshard on any smaller mesh has the named mesh's bits.

The truth is the definition, on lists of addends.
."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Shard
from weft.reshard import distribute, exact_sums, layout_of, reshard, start_reshard, to_global
from weft.reshard.moving.dtensor import wrap

from tests.reshard.test_exact_tree import numbers, same_bits, tree_of
from tests.support.collectives import Collectives

NAMED = {"dp": 4, "tp": 2}
PLACEMENTS = ["P", "R", "S(0)", "S(1)"]
SHAPES = [(8, 16), (5, 3)]  # the second is even over nothing


def layouts(mesh):
    return [Layout(mesh, f"dp: {a}, tp: {b}") for a, b in itertools.product(PLACEMENTS, PLACEMENTS)]


def value_of(layout, named, shape, dtype, seed):
    """The addends of a value on the named mesh: [named dp, named tp, *shape], with 1 where an axis is not Partial."""
    sizes = [named[axis] if isinstance(layout[axis], Partial) else 1 for axis in ("dp", "tp")]
    return numbers(seed, *sizes, *shape, dtype=dtype)


def local_of(value, layout, named, rank):
    """What a rank of the layout's mesh holds of a value: its coordinates' addends, stacked, and its shard of each."""
    mesh, shape = layout.mesh, value.shape[2:]
    coordinate = mesh.coordinate(rank)
    own = value[(..., *layout.local_slices(shape, rank))]
    for dim, axis in enumerate(("dp", "tp")):
        if isinstance(layout[axis], Partial):
            fold = named[axis] // mesh.axis_size(axis)
            own = own.narrow(dim, coordinate[axis] * fold, fold)
    kept = [size for size in own.shape[:2] if size > 1]
    return own.reshape((*kept, *own.shape[2:]))


def reduced(value, dims):
    """The value with the axes `dims` reduced in the tree; the innermost, dp, first."""
    for dim in sorted(dims):
        value = tree_of(list(value.movedim(dim, 0))).unsqueeze(dim)
    return value


def changed(value, src, dst, named, op="sum"):
    """The value after a change of layout, on the named mesh."""
    axes = ("dp", "tp")
    sums = [i for i, axis in enumerate(axes) if isinstance(src[axis], Partial) and not isinstance(dst[axis], Partial)]
    made = [axis for axis in axes if isinstance(dst[axis], Partial) and not isinstance(src[axis], Partial)]
    value = reduced(value, sums)
    changes = [axis for axis in axes if src[axis] != dst[axis]]
    for axis in made:
        dim, size = axes.index(axis), named[axis]
        repeated = torch.zeros_like(value).expand(*[size if i == dim else -1 for i in range(value.ndim)]).clone()
        placement = src[axis]
        shards = math.prod(named[each] for each in axes if src[each] == placement)
        in_place = changes == [axis] and isinstance(placement, Shard) and value.shape[2 + placement.dim] % shards == 0
        if in_place and shards == size:  # each shard in its place
            rows = value.shape[2 + placement.dim] // size
            for index in range(size):
                target = repeated.narrow(2 + placement.dim, index * rows, rows).select(dim, index)
                target.copy_(value.narrow(2 + placement.dim, index * rows, rows).select(dim, 0))
        else:
            repeated.select(dim, 0).copy_(value.select(dim, 0))
        value = repeated
    return value


def every_change(mesh_shape, named, dtype_name):
    """Every change of layout on the mesh; returns the number of changes."""
    mesh, rank, dtype = (
        ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]),
        dist.get_rank(),
        getattr(torch, dtype_name),
    )
    count = 0
    with exact_sums(named):
        for shape, src, dst in itertools.product(SHAPES, layouts(mesh), layouts(mesh)):
            value = value_of(src, named, shape, dtype, seed=count)
            x = wrap(local_of(value, src, named, rank), src, shape)
            result = reshard(x, dst)
            expected = local_of(changed(value, src, dst, named), dst, named, rank)
            assert layout_of(result) == dst
            assert same_bits(result.to_local(), expected), f"({src}) -> ({dst}) of {shape}, rank {rank}"
            count += 1
    return count


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)], ids=str)
def test_every_change_of_layout_has_the_bits_of_the_named_mesh(pool, mesh, dtype):
    assert set(pool.run(every_change, mesh, NAMED, dtype, ranks=math.prod(mesh))) == {512}


@pytest.mark.exhaustive
def test_the_named_mesh_itself(pool):
    assert set(pool.run(every_change, (4, 2), NAMED, "float32", ranks=8)) == {512}


@pytest.mark.exhaustive
@pytest.mark.parametrize("named", [{"dp": 3, "tp": 8}, {"dp": 12, "tp": 1}], ids=str)
@pytest.mark.parametrize("mesh", [(1, 1), (3, 1)], ids=str)
def test_other_named_meshes(pool, mesh, named):
    assert set(pool.run(every_change, mesh, named, "float32", ranks=math.prod(mesh))) == {512}


GRADIENTS = ["dp: P, tp: P", "dp: S(0), tp: P", "dp: P, tp: S(1)", "dp: R, tp: R", "dp: S(0), tp: S(1)"]


def backward_of_changes(mesh_shape, named):
    """Gradients of several layouts through a reshard, by `reshard` and by `start_reshard`."""
    mesh, rank, shape = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), dist.get_rank(), (8, 16)
    with exact_sums(named):
        for number, (src, dst, gradient) in enumerate(
            itertools.product(
                ["dp: S(0), tp: P", "dp: P, tp: R", "dp: R, tp: S(0)"], ["dp: S(0)", "tp: S(1)"], GRADIENTS
            )
        ):
            src, dst, gradient = (Layout(mesh, text) for text in (src, dst, gradient))
            value = value_of(src, named, shape, torch.float32, 0)
            x = wrap(local_of(value, src, named, rank), src, shape).requires_grad_()
            grad = value_of(gradient, named, shape, torch.float32, number)
            result = reshard(x, dst) if number % 2 else start_reshard(x, dst).wait()
            incoming = wrap(local_of(grad, gradient, named, rank), gradient, shape)
            (got,) = torch.autograd.grad(result, x, incoming)
            target = layout_of(got)
            assert target == src.replace(**{axis: "R" for axis in ("dp", "tp") if isinstance(src[axis], Partial)})
            expected = local_of(changed(grad, gradient, target, named), target, named, rank)
            assert same_bits(got.to_local(), expected), f"({src}) -> ({dst}), gradient ({gradient})"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)], ids=str)
def test_gradients_have_the_bits_of_the_named_mesh(pool, mesh):
    pool.run(backward_of_changes, mesh, NAMED, ranks=math.prod(mesh))


def averages_and_extremes(mesh_shape, named):
    mesh, rank, shape = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), dist.get_rank(), (4, 6)
    with exact_sums(named):
        for op, combine in (("max", torch.maximum), ("min", torch.minimum), ("product", torch.mul), ("avg", torch.add)):
            src = Layout(mesh, {"dp": Partial(op), "tp": Partial(op)})
            value = numbers(7, named["dp"], named["tp"], *shape, dtype=torch.bfloat16)
            truth = value
            for _ in range(2):  # dp, then tp
                rows = list(truth)
                while len(rows) > 1:
                    pairs = [combine(a, b) for a, b in zip(rows[0::2], rows[1::2], strict=False)]
                    rows = pairs + (rows[-1:] if len(rows) % 2 else [])
                truth = rows[0]
            truth = truth / (named["dp"] * named["tp"]) if op == "avg" else truth
            x = wrap(local_of(value, Layout(mesh, "dp: P, tp: P"), named, rank), src, shape)
            assert same_bits(to_global(x), truth), op
            dst = Layout(mesh, "tp: S(0)")
            own = truth[dst.local_slices(shape, rank)]
            assert same_bits(reshard(x, dst).to_local(), own), op
            finite = torch.arange(24.0).view(shape)
            assert torch.equal(to_global(distribute(finite, src)), finite), op


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_other_reductions(pool, mesh):
    pool.run(averages_and_extremes, mesh, NAMED, ranks=math.prod(mesh))


def to_another_mesh(named):
    """Between meshes that share no rank, and meshes of the same ranks in another order."""
    rank, shape = dist.get_rank(), (8, 16)
    first, second = ProcessMesh([[0], [1]], ("dp", "tp")), ProcessMesh([[3], [2]], ("dp", "tp"))
    other = ProcessMesh([[0, 1]], ("tp", "dp"))
    with exact_sums(named):
        for src_text, (there, dst_text) in itertools.product(
            ["dp: P, tp: P", "dp: S(0), tp: P"],
            [
                (second, "tp: S(0)"),
                (second, "dp: S(1)"),
                (second, "dp: P, tp: P"),
                (other, "tp: P"),
                (other, "dp: S(0)"),
            ],
        ):
            src, dst = Layout(first, src_text), Layout(there, dst_text)
            value = value_of(src, named, shape, torch.float32, 3)
            local = local_of(value, src, named, rank) if rank in first else torch.empty(0)
            result = reshard(wrap(local, src, shape), dst).to_local()
            if rank not in there:
                continue
            sums = [i for i, axis in enumerate(("dp", "tp")) if there != other or not isinstance(dst[axis], Partial)]
            expected = reduced(value, [i for i in sums if isinstance(src[("dp", "tp")[i]], Partial)])
            if there == second and isinstance(dst["dp"], Partial):
                whole = torch.zeros(named["dp"], named["tp"], *shape)
                whole[0, 0] = expected[0, 0]
                expected = whole
            assert same_bits(result, local_of(expected, dst, named, rank)), f"({src}) -> ({dst}) on {there}"


def test_between_meshes(pool):
    pool.run(to_another_mesh, NAMED, ranks=4)


def plain_collectives(named):
    """Kinds and bytes of layout changes on the rank's mesh, inside `exact_sums` and outside of it."""
    mesh, rank, shape = ProcessMesh.grid(dp=4), dist.get_rank(), (9, 7)
    seen = []
    for axes in (None, named, None):
        with exact_sums(axes):
            for src, dst in (("P", "R"), ("P", "S(0)"), ("R", "P"), ("S(0)", "R")):
                x = distribute(numbers(0, *shape), Layout(mesh, f"dp: {src}"))
                with Collectives() as collectives:
                    reshard(x, Layout(mesh, f"dp: {dst}"))
                seen.append((dst, tuple(dict.fromkeys(collectives.kinds)), sum(collectives.nbytes), collectives.names))
    return rank, seen


def test_bytes_are_the_ordinary_plans_and_entering_changes_no_other_plan(pool):
    for _, seen in pool.run(plain_collectives, {"dp": 4}, ranks=4):
        before, inside, after = seen[:4], seen[4:8], seen[8:]
        assert before == after
        assert (
            [each[1] for each in before]
            == [each[1] for each in inside]
            == [("all-reduce",), ("reduce-scatter",), (), ("all-gather",)]
        )
        assert before[0][3] == ["allreduce_"] and len(inside[0][3]) == 2
        for (_, _, ordinary, _), (_, _, exact, _) in zip(before, inside, strict=True):
            # 63 elements are padded to 64 for an all-reduce: 4 elements a rank and phase at most.
            assert ordinary <= exact <= ordinary + 2 * 3 * 4
        assert inside[1][2] == before[1][2]


def bytes_of_changes(mesh_shape, named):
    """For each change that sums: the bytes received, and those of the ordinary plan."""
    mesh, shape = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), (16, 16)
    rows = []
    for src, dst in itertools.product(layouts(mesh), layouts(mesh)):
        received = []
        for axes in (None, named):
            with exact_sums(axes):
                x = distribute(torch.ones(shape), src)
                with Collectives() as collectives:
                    reshard(x, dst)
                received.append(sum(collectives.nbytes))
        rows.append((f"({src}) -> ({dst})", *received))
    return rows


def may_take_more(text, mesh):
    """Axes that stay Partial move every addend; so do inner axes which are reduced before an outer axis is folded."""
    src, dst = (each.strip("()") for each in text.split(" -> "))
    stays = any(f"{axis}: P" in src and f"{axis}: P" in dst for axis in ("dp", "tp") if mesh != (4, 2))
    return stays or ("dp: P" in src and "tp: P" in src and mesh[0] > 1 and mesh[1] == 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (4, 1), (2, 2), (4, 2)], ids=str)
def test_bytes_are_at_most_the_ordinary_plans(pool, mesh):
    for rows in pool.run(bytes_of_changes, mesh, NAMED, ranks=math.prod(mesh)):
        for text, ordinary, exact in rows:
            made_in_other_way = ": S(" in text.split("->")[0] and "P" in text.split("->")[1]
            if not may_take_more(text, mesh) and not made_in_other_way:
                assert exact <= ordinary, text


def refusals():
    mesh = ProcessMesh.grid(dp=1)
    layout = Layout(mesh, "dp: P")
    with exact_sums({"dp": 4}):
        with pytest.raises(LayoutError, match=r"holds \(3,\), but \(dp: P\(sum\)\) of \(3,\) gives it \(4, 3\)"):
            reshard(wrap(torch.ones(3), layout, (3,)), placements="dp: R")
        number = distribute(torch.tensor(5.0), layout)
        assert number.to_local().tolist() == [5, 0, 0, 0]
        with pytest.raises(LayoutError, match="a number was asked of a DTensor that is Partial over 'dp'"):
            number.item()
        assert reshard(number).item() == 5
    assert distribute(torch.tensor(5.0), layout).item() == 5


def test_a_tensor_without_its_addends_is_refused(pool):
    pool.run(refusals, ranks=1)
