"""The layouts of gradients, by brute force: accepted layouts are right, on the operands' parts and the gradient's."""

import itertools

import pytest
import torch
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Shard, infer

from tests.support.shards import every_layout, rebuild, split

LINE, GRID = ProcessMesh.grid(tp=2), ProcessMesh.grid(dp=2, tp=2)
MESHES = [pytest.param(LINE, id="2"), pytest.param(ProcessMesh.grid(tp=3), id="3"), pytest.param(GRID, id="2x2")]
SIZES = {"m": 5, "k": 4, "n": 2}


def whole_of(term: str, seed: int) -> torch.Tensor:
    return torch.randint(
        -9, 9, [SIZES[index] for index in term], generator=torch.Generator().manual_seed(seed)
    ).double()


def layouts(mesh: ProcessMesh, ndim: int) -> list[Layout]:
    """Layouts with at most one reduction."""
    every = every_layout(mesh, ndim, [Partial("sum"), Partial("avg")])
    return [layout for layout in every if not {Partial("sum"), Partial("avg")} <= set(layout.placements)]


def taken_or_mixed(*arguments: object) -> None:
    try:
        infer.gradient(*arguments)
    except LayoutError as error:
        assert "would be Partial by sum and, on axis" in str(error)


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
    for a, b in itertools.product(layouts(mesh, x.ndim), layouts(mesh, y.ndim)):
        try:
            result = infer.einsum(equation, a, b)
        except LayoutError:
            continue
        xs, ys = split(x, a), split(y, b)
        for grad, gs in grads:
            try:
                of_x, of_y = (infer.gradient(result, grad, operand, (a, b)) for operand in (a, b))
            except LayoutError as error:
                if error.nearest:
                    taken_or_mixed(result, *error.nearest, a, (a, b))
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
        LayoutError, match=r"reshard the output before it is used, so that its gradient comes as \(tp: S\(0\)\)"
    ) as refused:
        infer.gradient(sharded, Layout(LINE, "tp: P"), sharded, (sharded,))
    assert refused.value.nearest == (sharded,)


@pytest.mark.parametrize(
    "output, operands",
    [
        pytest.param("tp: P(avg)", ["tp: S(0)"], id="an-average-over-the-axis"),
        pytest.param("tp: P(max)", ["tp: S(0)"], id="max"),
        pytest.param("tp: P(max)", ["tp: P(max)", ""], id="concat-of-max"),
        pytest.param("tp: P(product)", ["tp: P(product)", "tp: P(product)"], id="product"),
    ],
)
def test_no_gradient_is_given_where_ranks_have_shares(output, operands):
    layouts = [Layout(LINE, text) for text in operands]
    with pytest.raises(LayoutError, match=r"reshard the operands to Replicate\(\) on 'tp' before the operation"):
        infer.gradient(Layout(LINE, output), Layout(LINE), layouts[0], layouts)


def test_an_operand_is_one_of_the_operands():
    with pytest.raises(ValueError, match="is not among the operands"):
        infer.gradient(Layout(LINE), Layout(LINE), Layout(LINE, "tp: S(0)"), [Layout(LINE)])


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradients_of_a_sum_are_right(mesh):
    """2 x - 3 y, elementwise: each operand's gradient on the parts, against the whole one."""
    g = whole_of("mk", 2)
    taken = 0
    for a, b in itertools.product(layouts(mesh, 2), repeat=2):
        try:
            result = infer.elementwise("it", True, a, b)
        except LayoutError:
            continue
        for grad in every_layout(mesh, 2):
            try:
                of_x, of_y = (infer.gradient(result, grad, operand, (a, b)) for operand in (a, b))
            except LayoutError:
                continue
            taken += 1
            parts = split(g, grad)
            for factor, layout in ((2, of_x), (-3, of_y)):
                local = {rank: factor * part for rank, part in parts.items()}
                assert torch.equal(rebuild(local, layout, g.shape), factor * g), tuple(map(str, (a, b, grad, layout)))
    assert taken >= 4**mesh.ndim
