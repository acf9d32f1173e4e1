"""Every pair of layouts, up to the numbering of dims, simulated on integers and compared with the tensor's slices."""

import itertools

import pytest
import torch
from hypothesis import strategies as st
from weft.mesh import Layout, Partial, ProcessMesh
from weft.reshard import plan, simulate

from tests.support.search import searched
from tests.support.shards import every_layout, pairs_of, rebuild, split, whole_of

OPS = ("sum", "avg", "min", "max", "product")


def check(src, dst, whole, parts=None):
    """Asserts that the plan gives every rank its part of `whole`, and receives no less than any plan must."""
    made = plan(src, dst, whole.shape, whole.dtype)
    results = simulate(made, split(whole, src) if parts is None else parts)
    assert torch.equal(rebuild(results, dst, whole.shape), whole), str(made)
    assert made.lower_bound_bytes <= made.max_received_bytes, str(made)
    return made


def shapes_of(ndim, pairs, each):
    """`each` shapes for each of `pairs`, of sizes 0 to 7 in every dim, in turn: together they are all the shapes."""
    return itertools.islice(itertools.cycle(itertools.product(range(8), repeat=ndim)), pairs * each)


@pytest.mark.parametrize(
    "sizes, ndim, each",
    [
        pytest.param({"a": 2}, 1, 8, id="2-vector"),
        pytest.param({"a": 2}, 2, 64, id="2-matrix"),
        pytest.param({"a": 2}, 3, 64, id="2-cube"),
        pytest.param({"a": 3}, 1, 8, id="3-vector"),
        pytest.param({"a": 3}, 2, 64, id="3-matrix"),
        pytest.param({"a": 3}, 3, 64, id="3-cube"),
        pytest.param({"a": 2, "b": 2}, 1, 8, id="2x2-vector"),
        pytest.param({"a": 2, "b": 2}, 2, 9, id="2x2-matrix"),
        pytest.param({"a": 2, "b": 2}, 3, 3, id="2x2-cube"),
        pytest.param({"a": 2, "b": 3}, 1, 8, id="2x3-vector"),
        pytest.param({"a": 2, "b": 3}, 2, 9, id="2x3-matrix"),
        pytest.param({"a": 2, "b": 3}, 3, 3, id="2x3-cube"),
        pytest.param({"a": 3, "b": 2}, 1, 8, id="3x2-vector"),
        pytest.param({"a": 3, "b": 2}, 2, 9, id="3x2-matrix"),
        pytest.param({"a": 3, "b": 2}, 3, 3, id="3x2-cube"),
        pytest.param({"a": 2, "b": 2, "c": 2}, 1, 3, id="2x2x2-vector"),
    ],
)
def test_every_pair(portion, sizes, ndim, each):
    pairs = pairs_of(every_layout(ProcessMesh.grid(**sizes), ndim))
    shapes = shapes_of(ndim, len(pairs), each)
    for src, dst, shape in portion.of([(*pair, next(shapes)) for pair in pairs for _ in range(each)], every=60):
        check(src, dst, whole_of(shape))


@pytest.mark.few(2)
@pytest.mark.parametrize("quarter", range(4))
def test_every_pair_on_2x2x2(portion, quarter):
    """Tensors with three dims cover tensors with two, as the last dim may be on no axis."""
    pairs = pairs_of(every_layout(ProcessMesh.grid(a=2, b=2, c=2), 3))
    shapes = itertools.cycle(itertools.product((7, 5, 1, 3, 6, 4, 2, 0), repeat=3))
    for shape, (src, dst) in portion.of(zip(shapes, pairs[quarter::4], strict=False), every=150):
        check(src, dst, whole_of(shape))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(ProcessMesh([[3, 0], [5, 1]], ["tp", "dp"]), id="any-ranks"),
        pytest.param(ProcessMesh.grid(dp=1, tp=2), id="1x2"),
        pytest.param(ProcessMesh([2, 0, 1], ["tp"]), id="turned"),
    ],
)
def test_every_pair_on_other_meshes(mesh):
    for src, dst in itertools.product(every_layout(mesh, 2), repeat=2):
        check(src, dst, whole_of((5, 3)))


def test_every_pair_of_a_scalar():
    for src, dst in itertools.product(every_layout(ProcessMesh.grid(dp=2, tp=2), 0), repeat=2):
        check(src, dst, torch.tensor(5))


@pytest.mark.parametrize("op", OPS)
def test_every_reduction(portion, op):
    """Source and target may both be Partial, on the same axis or on different axes."""
    dtype = torch.float64 if op == "avg" else torch.int64
    for mesh in (ProcessMesh.grid(dp=2, tp=2), ProcessMesh.grid(dp=2, tp=3)):
        for src, dst in portion.of(itertools.product(every_layout(mesh, 2, [Partial(op)]), repeat=2), every=30):
            if op == "avg" and mesh.size == 6 and src.is_partial():
                continue  # a third is no float
            check(src, dst, whole_of((5, 3), dtype))


@pytest.mark.parametrize(
    "first, then, dtype",
    [
        pytest.param(first, then, dtype, id=f"{first}-{then}-{dtype}".replace("torch.", ""))
        for first, then in itertools.permutations(OPS, 2)
        for dtype in (torch.int64, torch.float64)
        if dtype.is_floating_point or "avg" not in (first, then)
    ],
)
def test_one_reduction_resolved_while_another_begins(first, then, dtype):
    """The identity of the second may not be reduced by the first: a sum of ones is 2."""
    grid = ProcessMesh.grid(dp=2, tp=2)
    for ahead, behind in (("dp", "tp"), ("tp", "dp")):
        for before in ("R", "S(0)", "S(1)"):
            src = Layout(grid, f"{ahead}: P({first}), {behind}: {before}")
            for dst in (f"{behind}: P({then})", f"{ahead}: S(0), {behind}: P({then})"):
                check(src, Layout(grid, dst), whole_of((5, 3), dtype))


@st.composite
def problems(draw, partial=True, layouts=2, most=4):
    """A mesh of up to four axes, a shape of up to three dims, and layouts in any shard order."""
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=4).filter(lambda s: torch.Size(s).numel() <= 24))
    mesh = ProcessMesh.grid(**dict(zip(("pp", "dp", "cp", "tp"), sizes, strict=False)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    options = ["R", *(f"S({dim})" for dim in range(len(shape))), *(["P(sum)"] if partial else [])]

    def layout():
        axes = draw(st.permutations(mesh.axis_names))
        return Layout(mesh, ", ".join(f"{axis}: {draw(st.sampled_from(options))}" for axis in axes))

    return shape, *(layout() for _ in range(layouts))


@searched(problems(), examples=150)
def test_larger_meshes_and_more_dims(problem):
    shape, src, dst = problem
    check(src, dst, whole_of(shape))


@searched(problems(partial=False), examples=100)
def test_there_and_back_is_the_identity(problem):
    shape, a, b = problem
    parts = split(whole_of(shape), a)
    there = simulate(plan(a, b, shape, torch.int64), parts)
    back = simulate(plan(b, a, shape, torch.int64), there)
    assert all(torch.equal(back[rank], parts[rank]) for rank in parts)


@searched(problems(partial=False, layouts=3), examples=100)
def test_by_way_of_another_layout(problem):
    """A -> B -> C holds the same as A -> C, and costs as many bytes or more: the triangle inequality."""
    shape, a, b, c = problem
    first, second, direct = (plan(x, y, shape, torch.int64) for x, y in ((a, b), (b, c), (a, c)))
    parts = split(whole_of(shape), a)
    over_b, straight = simulate(second, simulate(first, parts)), simulate(direct, parts)
    assert all(torch.equal(over_b[rank], straight[rank]) for rank in parts)
    assert direct.max_received_bytes <= first.max_received_bytes + second.max_received_bytes


@searched(problems(most=3), st.integers(0, 400), examples=100)
def test_no_step_exceeds_the_memory_limit(problem, spare):
    shape, src, dst = problem
    free = plan(src, dst, shape, torch.int64)
    limit = max(0, free.peak_bytes - spare)
    try:
        made = plan(src, dst, shape, torch.int64, memory_limit=limit)
    except ValueError as error:
        assert f"memory_limit={limit}" in str(error)
        assert spare
        return
    assert made.peak_bytes <= limit
    whole = whole_of(shape)
    assert torch.equal(rebuild(simulate(made, split(whole, src)), dst, shape), whole)
