"""Sums in the fixed tree: the same bits however the addends are split, from the definition alone."""

import itertools
import math

import pytest
import torch
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import exact_sums
from weft.reshard.moving.tree import Members, addends_of, stacked_shape, tree_order, tree_reduce, tree_sum


def tree_of(addends):
    """The definition, on a list: neighbours are added, and the last of an odd number goes up."""
    while len(addends) > 1:
        pairs = [a + b for a, b in zip(addends[0::2], addends[1::2], strict=False)]
        addends = pairs + (addends[-1:] if len(addends) % 2 else [])
    return addends[0]


def same_bits(a, b):
    """Whether two tensors have the same bits; any two NaNs are alike."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    numbers = {torch.float64: torch.int64, torch.float32: torch.int32}.get(a.dtype, torch.int16)
    equal = a.contiguous().view(numbers) == b.contiguous().view(numbers)
    return bool((equal | (a.isnan() & b.isnan())).all())


def numbers(seed, *shape, dtype=torch.float32):
    """Of very different sizes, so that most orders of a sum give different bits; some infinite, some NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    odd = torch.rand(shape, generator=generator)
    for share, value in ((0.01, math.inf), (0.02, -math.inf), (0.03, math.nan), (0.05, -0.0)):
        values = torch.where((odd < share) & (odd >= share - 0.01), torch.tensor(value), values)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 13, 16])
def test_tree_sum_is_the_tree_of_the_definition(count, dtype):
    stacked = numbers(count, count, 5, 7, dtype=dtype)
    before = stacked.clone()
    assert same_bits(tree_sum(stacked), tree_of(list(stacked)))
    assert same_bits(stacked, before), "not changed"
    assert tree_sum(stacked[:, :0]).shape == (0, 7)


def test_the_order_matters_for_these_numbers():
    stacked = numbers(0, 8, 1000)
    flat = stacked[0]
    for each in stacked[1:]:
        flat = flat + each
    assert not same_bits(tree_sum(stacked), flat)
    assert not same_bits(tree_sum(stacked), tree_sum(stacked[[0, 2, 1, 3, 4, 5, 6, 7]]))


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_long_addends_are_added_in_chunks(count, monkeypatch):
    stacked = numbers(count, count, 2, 5, 21)
    in_one = [tree_sum(stacked), tree_reduce("sum", stacked.transpose(0, 1), (1, 0)), tree_sum(stacked.mT)]
    for chunk in (1, 2, 64, 104, 105, 210):
        monkeypatch.setattr("weft.reshard.moving.tree._CHUNK", chunk)
        in_chunks = [tree_sum(stacked), tree_reduce("sum", stacked.transpose(0, 1), (1, 0)), tree_sum(stacked.mT)]
        assert all(same_bits(a, b) for a, b in zip(in_one, in_chunks, strict=True)), chunk


def test_axes_are_added_in_one_order():
    assert tree_order(("pp", "tp", "x", "dp", "cp")) == ("dp", "cp", "tp", "pp", "x")
    assert tree_order(()) == ()
    stacked = numbers(1, 4, 3, 2, 50)  # dp, cp, tp
    by_hand = tree_of([tree_of([tree_of(list(stacked[:, c, t])) for c in range(3)]) for t in range(2)])
    assert same_bits(tree_reduce("sum", stacked, (0, 1, 2)), by_hand)
    mixed = stacked.permute(2, 0, 1, 3)  # tp, dp, cp
    assert same_bits(tree_reduce("sum", mixed, (1, 2, 0)), by_hand)


def meshes_of(named):
    """Every mesh on which a coordinate stands for a power of two of coordinates, or for all of them."""
    sizes = [
        [size for size in range(1, n + 1) if n % size == 0 and (size == 1 or (n // size).bit_count() == 1)]
        for n in named
    ]
    return itertools.product(*sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("named", [(4, 2), (8, 1), (2, 4), (6, 2), (3, 4), (12, 2), (16, 4)], ids=str)
def test_a_rank_may_add_its_own_addends_first(named, dtype):
    addends = numbers(2, *named, 60, dtype=dtype)
    truth = tree_reduce("sum", addends, (0, 1))
    count = 0
    for mesh in meshes_of(named):
        (m, n), (f, g) = mesh, (named[0] // mesh[0], named[1] // mesh[1])
        by_rank = addends.view(m, f, n, g, 60)
        # The inner axis: a rank's own, then across ranks; then the outer axis likewise.
        inner = torch.stack([tree_sum(by_rank[i]) for i in range(m)])  # [m, n, g, 60]
        inner = tree_sum(inner)
        outer = torch.stack([tree_sum(inner[j]) for j in range(n)])
        assert same_bits(tree_sum(outer), truth), mesh
        count += 1
    assert count >= 3


@pytest.mark.parametrize("positions", [range(8), [3, 1, 7, 0, 2, 6, 4, 5]], ids=["in-order", "shuffled"])
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_members_stand_where_their_coordinates_say(op, positions):
    rows = numbers(3, 8, 40)
    of_positions = torch.empty_like(rows)
    for row, position in zip(rows, positions, strict=True):
        of_positions[position] = row
    # Axes in the order (tp 2, dp 4): dp is added first.
    combine = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}[op]
    parts = [
        combine(combine(a, b), combine(c, d)) for a, b, c, d in (of_positions[:4].unbind(), of_positions[4:].unbind())
    ]
    assert same_bits(Members(positions, (2, 4), (1, 0)).reduce(op, rows), combine(*parts))


def test_stacked_shapes():
    mesh = ProcessMesh.grid(dp=2, tp=1)
    layout = Layout(mesh, "dp: P, tp: P")
    assert stacked_shape(layout, (6, 3), 0) == (6, 3)
    with exact_sums({"dp": 4, "tp": 4}):
        assert stacked_shape(layout, (6, 3), 1) == (2, 4, 6, 3)
        assert stacked_shape(layout, (), 1) == (2, 4)
        assert stacked_shape(Layout(mesh, "dp: S(0), tp: P"), (6, 3), 1) == (4, 3, 3)
        assert stacked_shape(Layout(mesh, "dp: S(0)"), (6, 3), 1) == (3, 3)
        assert stacked_shape(layout, (6, 3), 7) == (0,), "a rank outside the mesh holds nothing"
    with exact_sums({"dp": 2}):
        assert addends_of(layout).axes == ()


def test_ranks_that_stand_for_no_subtree_are_refused():
    with exact_sums({"dp": 6, "tp": 3}):
        assert addends_of(Layout(ProcessMesh.grid(dp=3, tp=1), "dp: P, tp: P")).sizes == (2, 3)
        with pytest.raises(LayoutError, match="dp=6, and each coordinate of dp=2 stands for 3, no power of two"):
            addends_of(Layout(ProcessMesh.grid(dp=2, tp=1), "dp: P"))
        with pytest.raises(ValueError, match="dp=4 of the mesh does not divide"):
            addends_of(Layout(ProcessMesh.grid(dp=4), "dp: P"))


@pytest.mark.parametrize("axes", [{"dp": 0}, {"dp": -2}, {"tp": 2.0}, {"dp": True}], ids=str)
def test_a_size_that_is_no_size_is_refused(axes):
    (axis,) = axes
    with pytest.raises(ValueError, match=f"exact names {axis}="), exact_sums(axes):
        pass
    with exact_sums({"dp": 3}):
        assert addends_of(Layout(ProcessMesh.grid(dp=3), "dp: P")).axes == (), "the block before left no mesh named"
