"""Inference, by brute force: each rule refuses the layouts, or the op on the parts is the parts of the op."""

import itertools

import pytest
import torch
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Shard, infer

from tests.support.shards import every_layout, rebuild, split

LINE = ProcessMesh.grid(tp=2)
THREE = ProcessMesh.grid(tp=3)
GRID = ProcessMesh.grid(dp=2, tp=2)
MESHES = [pytest.param(LINE, id="2"), pytest.param(THREE, id="3"), pytest.param(GRID, id="2x2")]
SIZES = {"m": 5, "k": 3, "n": 2, "b": 1}  # uneven over 2 and 3, and some parts empty


def whole_of(term: str, seed: int) -> torch.Tensor:
    shape = [SIZES[index] for index in term]
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "equation, fewest_taken",
    [
        pytest.param("mk,kn->mn", 6, id="matmul"),
        pytest.param("mk,nk->mn", 6, id="linear"),
        pytest.param("mk,mk->", 4, id="dot"),
        pytest.param("mk,k->mk", 5, id="scale"),
        pytest.param("m,m->m", 4, id="product"),
        pytest.param("mk,->km", 5, id="transpose-and-scale"),
        pytest.param("mk->k", 4, id="sum"),
        pytest.param("kk->k", 2, id="diagonal"),
        pytest.param("bm,bk->bmk", 6, id="outer"),
    ],
)
def test_einsum_is_refused_or_right(mesh, equation, fewest_taken):
    terms = equation.partition("->")[0].split(",")
    wholes = [whole_of(term, seed) for seed, term in enumerate(terms)]
    expected = torch.einsum(equation, *wholes)
    every = [[(layout, split(whole, layout)) for layout in every_layout(mesh, whole.ndim)] for whole in wholes]
    taken = 0
    for chosen in itertools.product(*every):
        layouts = [layout for layout, _ in chosen]
        try:
            result = infer.einsum(equation, *layouts)
        except LayoutError:
            continue
        taken += 1
        local = {rank: torch.einsum(equation, *(parts[rank] for _, parts in chosen)) for rank in mesh.ranks}
        assert torch.equal(rebuild(local, result, expected.shape), expected), (*map(str, layouts), str(result))
    assert taken >= fewest_taken**mesh.ndim


def test_three_operands():
    equation = "mk,kn,n->m"
    wholes = [whole_of(term, seed) for seed, term in enumerate(("mk", "kn", "n"))]
    expected = torch.einsum(equation, *wholes)
    taken = 0
    for layouts in itertools.product(*(every_layout(THREE, whole.ndim) for whole in wholes)):
        try:
            result = infer.einsum(equation, *layouts)
        except LayoutError:
            continue
        taken += 1
        parts = [split(whole, layout) for whole, layout in zip(wholes, layouts, strict=True)]
        local = {rank: torch.einsum(equation, *(part[rank] for part in parts)) for rank in THREE.ranks}
        assert torch.equal(rebuild(local, result, expected.shape), expected), (*map(str, layouts), str(result))
    assert taken == 7  # replicated, m, k or n sharded, one operand Partial


@pytest.mark.parametrize(
    "equation, layouts, result",
    [
        pytest.param("mk,kn->mn", ("", ""), "", id="replicated"),
        pytest.param("mk,kn->mn", ("dp: S(0)", "tp: S(1)"), "dp: S(0), tp: S(1)", id="column"),
        pytest.param("mk,kn->mn", ("dp: S(0), tp: S(1)", "tp: S(0)"), "dp: S(0), tp: P(sum)", id="row"),
        pytest.param("mk,kn->mn", ("dp: P", ""), "dp: P", id="partial-passes"),
        pytest.param("mk,kn->mn", ("tp: S(0), dp: S(0)", ""), "tp: S(0), dp: S(0)", id="order-is-kept"),
        pytest.param("mk,kn->nm", ("tp: S(0), dp: S(0)", ""), "tp: S(1), dp: S(1)", id="order-is-kept-transposed"),
        pytest.param("mk,kn->mn", ("tp: S(1), dp: S(1)", "tp: S(0), dp: S(0)"), "dp: P, tp: P", id="contracted-twice"),
    ],
)
def test_einsum_gives(equation, layouts, result):
    assert infer.einsum(equation, *(Layout(GRID, layout) for layout in layouts)) == Layout(GRID, result)


@pytest.mark.parametrize(
    "equation, layouts, message",
    [
        pytest.param(
            "mk,kn->mn", ("tp: S(1)", ""), r"operand 1 \('kn'\) is R there; reshard it to Shard\(0\)", id="one"
        ),
        pytest.param("mk,kn->mn", ("tp: S(0)", "tp: S(1)"), r"shards the indices \['m', 'n'\]", id="two-indices"),
        pytest.param("mk,kn->mn", ("tp: P", "tp: P"), "reshard operand 0 to Replicate", id="two-partials"),
        pytest.param("mk,kn->mn", ("", "tp: P(max)"), "reshard operand 1 to Replicate", id="max"),
        pytest.param(
            "mk,kn->mn", ("dp: S(1), tp: S(1)", "tp: S(0), dp: S(0)"), "index 'k' .* in the orders", id="orders"
        ),
        pytest.param("mk,kn->mn", ("",), "has 2 operands, got 1", id="too-few"),
        pytest.param("mk,kn", ("", ""), "name each index by a letter", id="no-output"),
        pytest.param("...k,kn->...n", ("", ""), "name each index by a letter", id="ellipsis"),
        pytest.param(
            "mk,k->m", ("", "tp: S(1)"), r"shards dim 1 of operand 1 \('k'\), which has 1 dims", id="no-such-dim"
        ),
        pytest.param("kk->k", ("tp: S(0)",), r"operand 0 \('kk'\) has twice", id="diagonal"),
    ],
)
def test_einsum_refuses(equation, layouts, message):
    with pytest.raises(LayoutError, match=message):
        infer.einsum(equation, *(Layout(GRID, layout) for layout in layouts))


def test_operands_on_different_meshes_are_refused():
    with pytest.raises(LayoutError, match="different meshes"):
        infer.einsum("mk,kn->mn", Layout(GRID), Layout(GRID.rename(dp="pp")))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("op", [torch.add, torch.mul])
def test_elementwise_is_refused_or_right(mesh, op):
    x, y = whole_of("mk", 0), whole_of("mk", 1)
    taken = 0
    for a, b in itertools.product(every_layout(mesh, 2, [Partial("sum"), Partial("max")]), repeat=2):
        try:
            result = infer.elementwise(op.__name__, op is torch.add, a, b)
        except LayoutError:
            continue
        taken += 1
        xs, ys = split(x, a), split(y, b)
        local = {rank: op(xs[rank], ys[rank]) for rank in mesh.ranks}
        assert torch.equal(rebuild(local, result, x.shape), op(x, y)), (str(a), str(b))
    assert taken >= (4 if op is torch.add else 3) ** mesh.ndim


def test_elementwise_says_what_to_reshard():
    with pytest.raises(LayoutError, match=r"operand 0 is \(tp: R\), operand 1 is \(tp: S\(0\)\)"):
        infer.elementwise("add", True, Layout(LINE), Layout(LINE, "tp: S(0)"))
    with pytest.raises(LayoutError, match="mul is not linear"):
        infer.elementwise("mul", False, Layout(LINE, "tp: P"), Layout(LINE, "tp: P"))


@pytest.mark.parametrize(
    "layout, dim, fits",
    [
        pytest.param("tp: S(0)", 1, True, id="other-dim"),
        pytest.param("tp: S(1)", 1, False, id="sharded"),
        pytest.param("tp: P", 1, False, id="partial"),
        pytest.param("", 1, True, id="replicated"),
    ],
)
def test_whole(layout, dim, fits):
    if fits:
        infer.whole("norm", "x", Layout(LINE, layout), dim)
    else:
        with pytest.raises(LayoutError, match=r"norm needs dim 1 of x whole, .* reshard it to Replicate\(\) on 'tp'"):
            infer.whole("norm", "x", Layout(LINE, layout), dim)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("equation", ["mk,kn->mn", "mk,k->mk", "mk,mk->mk"], ids=["matmul", "scale", "product"])
def test_a_gradient_is_refused_or_right(mesh, equation):
    """Each operand's gradient, computed on the parts, against the whole one; for every layout of the incoming one."""
    inputs, _, output = equation.partition("->")
    first, second = inputs.split(",")
    x, y, g = whole_of(first, 0), whole_of(second, 1), whole_of(output, 2)
    backward = (f"{output},{second}->{first}", f"{output},{first}->{second}")
    truth = (torch.einsum(backward[0], g, y), torch.einsum(backward[1], g, x))
    grads = [(layout, split(g, layout)) for layout in every_layout(mesh, g.ndim)]
    taken = 0
    for a, b in itertools.product(every_layout(mesh, x.ndim), every_layout(mesh, y.ndim)):
        try:
            result = infer.einsum(equation, a, b)
        except LayoutError:
            continue
        xs, ys = split(x, a), split(y, b)
        for grad, gs in grads:
            try:
                of_x, of_y = (infer.gradient(result, grad, operand, (a, b)) for operand in (a, b))
            except LayoutError:
                continue
            taken += 1
            dx = {rank: torch.einsum(backward[0], gs[rank], ys[rank]) for rank in mesh.ranks}
            dy = {rank: torch.einsum(backward[1], gs[rank], xs[rank]) for rank in mesh.ranks}
            where = tuple(map(str, (a, b, grad, of_x, of_y)))
            assert torch.equal(rebuild(dx, of_x, x.shape), truth[0]), where
            assert torch.equal(rebuild(dy, of_y, y.shape), truth[1]), where
    assert taken >= 4**mesh.ndim


def test_a_gradient_keeps_the_shard_order_of_its_operand():
    layout = Layout(GRID, "tp: S(0), dp: S(0)")
    assert infer.gradient(layout, layout, layout, (layout, Layout(GRID))) == layout
    with pytest.raises(LayoutError, match="its gradient arrived as"):
        infer.gradient(layout, Layout(GRID, [Shard(0), Shard(0)]), layout, (layout,))


def test_a_partial_gradient_of_a_sharded_output_is_refused():
    sharded = Layout(LINE, "tp: S(0)")
    with pytest.raises(
        LayoutError, match=r"reshard the output before it is used, so that the gradient comes as S\(0\)"
    ):
        infer.gradient(sharded, Layout(LINE, "tp: P"), sharded, (sharded,))
