"""Every rule of layout inference, proved by brute force: right layouts are accepted, and wrong ones refused."""

import contextlib
import itertools
import math

import pytest
import torch
from hypothesis import strategies as st
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard, infer

from tests.support.inference import Trial, prove, trials
from tests.support.search import searched
from tests.support.shards import every_layout, split

LINE, GRID = ProcessMesh.grid(tp=2), ProcessMesh.grid(dp=2, tp=2)
MESHES = [
    pytest.param(LINE, id="2"),
    pytest.param(ProcessMesh.grid(tp=3), id="3"),
    pytest.param(GRID, id="2x2"),
    # Beside 2x2 this mesh shows what 3 shows beside 2.
    pytest.param(ProcessMesh.grid(dp=2, tp=3), id="2x3", marks=pytest.mark.exhaustive),
]
LINES = MESHES[:2]
SIZES = {"m": 5, "k": 4, "n": 7}  # uneven over 2 and 3, and 4 over 3 leaves a part empty


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random small integers; the seeds give each operand numbers of its own."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def few(mesh: ProcessMesh, *ops: str) -> dict[str, object]:
    """Fewer reductions on two axes, as a rule treats each axis alike."""
    return {} if mesh.ndim == 1 else {"partials": [Partial(op) for op in dict.fromkeys(("sum", "max", *ops))]}


def sets(*shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Four sets of operands of these shapes; the last set is the first with the opposite sign."""
    first = [[integers(*shape, seed=10 * turn + number) for number, shape in enumerate(shapes)] for turn in range(3)]
    return [*first, [-operand for operand in first[0]]]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "equation",
    [
        pytest.param("mk,kn->mn", id="matmul"),
        pytest.param("mk,mk->", id="dot"),
        pytest.param("mk,k->mk", id="scale"),
        pytest.param("m,m->m", id="product"),
        pytest.param("mk,->km", id="transpose-and-scale"),
        pytest.param("mk->k", id="sum"),
        pytest.param("mk->km", id="transpose"),
        pytest.param("kk->k", id="diagonal"),
        pytest.param("m,k->mk", id="outer"),
    ],
)
def test_einsum(mesh, equation):
    shapes = [tuple(SIZES[index] for index in term) for term in equation.partition("->")[0].split(",")]
    tried = trials(lambda *operands: torch.einsum(equation, *operands), *sets(*shapes))
    taken = prove(lambda *layouts: infer.einsum(equation, *layouts), tried, mesh, **few(mesh))
    assert taken >= 2**mesh.ndim


@pytest.mark.parametrize("mesh", LINES)
def test_einsum_of_three(mesh):
    equation = "mk,kn,n->m"
    tried = trials(lambda *operands: torch.einsum(equation, *operands), *sets((5, 4), (4, 7), (7,)))
    prove(lambda *layouts: infer.einsum(equation, *layouts), tried, mesh, partials=[Partial("sum"), Partial("avg")])


LINEAR = (lambda x, y: 2 * x - 3 * y, lambda x, y: 2 * y - 3 * x, lambda x, y: 5 * x - 3 * y)
NOT_LINEAR = (lambda x, y: x * x - x * y + y**3, lambda x, y: y * y - x * y - x**3)
CLASSES = [pytest.param(True, LINEAR, id="linear"), pytest.param(False, NOT_LINEAR, id="not-linear")]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("linear, ops", CLASSES)
def test_elementwise(mesh, linear, ops):
    tried = [trial for op in ops for trial in trials(op, *sets((5, 4), (5, 4)))]
    prove(lambda *layouts: infer.elementwise("it", linear, *layouts), tried, mesh, **few(mesh))


@pytest.mark.parametrize("mesh", LINES)
@pytest.mark.parametrize("linear, ops", CLASSES)
@pytest.mark.parametrize(
    "shapes", [((5, 4), (4,)), ((5, 4), (5, 1)), ((5, 1), (1, 4)), ((4,), (5, 4)), ((), (5,))], ids=str
)
def test_elementwise_broadcast(mesh, linear, ops, shapes):
    tried = [trial for op in ops for trial in trials(op, *sets(*shapes))]
    prove(lambda *layouts: infer.elementwise("it", linear, *layouts, shapes=shapes), tried, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dims", [0, 1, (0, 1)], ids=str)
def test_whole(mesh, dims):
    """Like softmax: each element depends on all elements along the dims, and not linearly."""
    tried = trials(lambda x: x * x.square().sum(dims, keepdim=True), *sets((5, 4)))
    prove(lambda layout: infer.whole("softmax", "x", layout, dims), tried, mesh, **few(mesh))


def product(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim, keepdim=keepdim)
    return x


REDUCTIONS = {
    "sum": torch.Tensor.sum,
    "avg": lambda x, dims, keepdim: (x * math.factorial(7)).mean(dims, keepdim=keepdim),  # exact
    "min": torch.Tensor.amin,
    "max": torch.Tensor.amax,
    "product": product,
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "shape, dims", [((5, 4), (0,)), ((5, 4), (1,)), ((6, 4), (0, 1)), ((6, 12), (0,)), ((3,), ())], ids=str
)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("keepdim", [False, True], ids=["drop", "keep"])
def test_reduction(mesh, op, shape, dims, keepdim):
    def compute(x):
        return REDUCTIONS[op](x, dims, keepdim=keepdim) if dims else x  # of no dims torch reduces all

    operands = sets(shape)
    if op == "product":
        operands = [[1 + x.remainder(2) for x in each] for each in operands]  # small: the products of 24 are exact
    prove(
        lambda layout: infer.reduction(op, layout, shape, dims, keepdim=keepdim),
        trials(compute, *operands),
        mesh,
        **few(mesh, op),
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dims", [(1, 0, 2), (2, 0, 1), (0, 1, 2)], ids=str)
def test_transpose(mesh, dims):
    tried = trials(lambda x: x.permute(dims), *sets((5, 4, 3)))
    taken = prove(lambda layout: infer.transpose(layout, dims), tried, mesh, **few(mesh))
    assert taken == (9 if mesh.ndim == 1 else 37)  # every layout with at most one reduction


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "shape, new",
    [
        ((6,), (2, 3)), ((2, 3), (6,)), ((4, 6), (24,)), ((24,), (4, 6)), ((5, 4), (20,)), ((12,), (3, 4)),
        ((4, 6), (6, 4)), ((4, 3, 2), (12, 2)), ((4, 3, 2), (4, 6)),
        ((2, 2, 3), (4, 3)), ((1, 6), (6,)), ((6,), (1, 6)),
        ((6, 1), (1, 6)), ((2, 1, 4), (2, 4, 1)), ((4,), (4,)),
        ((3, 4), (3, 2, 2)), ((0, 4), (0,)), ((1,), ()), ((), (1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_reshape(mesh, shape, new):
    tried = [Trial(lambda rank, layouts, part: part, x.reshape(new), [x]) for (x,) in sets(shape)]
    prove(lambda layout: infer.reshape(layout, shape, new), tried, mesh, reshaped=True, **few(mesh))


def picked(layout: Layout, rank: int, part: torch.Tensor, index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """This rank's share of `take_along_dim`: zeros where the index is of another's part."""
    whole = [0] * part.ndim
    whole[dim] = size
    start = layout.local_slices(whole, rank)[dim].start
    mine = (index >= start) & (index < start + part.shape[dim])
    if not part.shape[dim]:
        return torch.zeros_like(index)
    return part.take_along_dim(torch.where(mine, index - start, 0).long(), dim) * mine


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dim", [0, 1])
def test_gather(mesh, dim):
    index = torch.randint(0, 4, (7, 4) if dim == 0 else (5, 7), generator=torch.Generator().manual_seed(0)).double()

    def local(rank, layouts, part, index):
        return picked(layouts[0], rank, part, index, dim, (5, 4)[dim])

    tried = [Trial(local, x.take_along_dim(index.long(), dim), [x, index]) for (x,) in sets((5, 4))]
    prove(lambda *layouts: infer.gather(*layouts, dim, 2), tried, mesh, **few(mesh))


@pytest.mark.parametrize("mesh", MESHES)
def test_embedding(mesh):
    def local(rank, layouts, tokens, table):
        return picked(layouts[1], rank, table, tokens[:, None].expand(-1, table.shape[1]), 0, 7)

    tokens = torch.tensor([3, 0, 6, 6, 2]).double()
    tried = [Trial(local, table[tokens.long()], [tokens, table]) for (table,) in sets((7, 4))]
    prove(lambda *layouts: infer.embedding(*layouts, 1), tried, mesh, **few(mesh))


@pytest.mark.parametrize("mesh", MESHES)
def test_concat(mesh):
    tried = trials(lambda *parts: torch.cat(parts, 1), *sets((5, 4), (5, 3)))
    prove(lambda *layouts: infer.concat(1, *layouts), tried, mesh, **few(mesh))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("start", [0, 2])
def test_split(mesh, start):
    """Half of dim 1: every rank takes the same place of its part."""
    prove(
        lambda layout: infer.split(layout, 1), trials(lambda x: x.narrow(1, start, 2), *sets((5, 4))), mesh, **few(mesh)
    )


@searched(st.data())
def test_reshape_of_any_shape_on_any_mesh(data):
    """Every accepted layout is right on every rank, though the rule looks at some ranks only."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    mesh = ProcessMesh.grid(**dict(zip("abc", sizes, strict=False)))
    factors = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    shape, new = (tuple(map(math.prod, groups(factors, data))) for _ in range(2))
    axes = data.draw(st.permutations(mesh.axis_names))
    placements = st.sampled_from([*map(Shard, range(len(shape))), Replicate()])
    layout = Layout.in_order(mesh, {axis: data.draw(placements) for axis in axes})
    try:
        answer = infer.reshape(layout, shape, new)
    except LayoutError as error:
        (near,) = error.nearest
        infer.reshape(near, shape, new)
        return
    whole = torch.arange(math.prod(shape))
    for rank in mesh.ranks:
        before, after = (
            whole.reshape(shape)[layout.local_slices(shape, rank)],
            whole.reshape(new)[answer.local_slices(new, rank)],
        )
        assert torch.equal(before.flatten(), after.flatten()), (str(layout), shape, new, str(answer))


def groups(factors: list[int], data: st.DataObject) -> list[list[int]]:
    """The factors, neighbours put together."""
    ends = sorted(data.draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
    return [factors[start:end] for start, end in itertools.pairwise([0, *ends])]


RULES = [
    *(
        pytest.param(shape, lambda layout, shape=shape, new=new: infer.reshape(layout, shape, new), id=f"{shape}-{new}")
        for shape, new in [
            ((16,), (2, 8)),
            ((4, 6), (24,)),
            ((5, 4), (20,)),
            ((2, 3, 1), (3, 2, 1)),
            ((6, 4), (3, 2, 4)),
        ]
    ),
    *(
        pytest.param(
            shape, lambda layout, shape=shape, op=op: infer.reduction(op, layout, shape, (0,)), id=f"{op}-{shape}"
        )
        for op, shape in [("avg", (6,)), ("avg", (12, 12)), ("avg", (5, 1)), ("max", (2,)), ("max", (3, 5))]
    ),
]


@pytest.mark.parametrize(
    "mesh", [GRID, ProcessMesh.grid(dp=2, tp=3), ProcessMesh.grid(dp=2, tp=4)], ids=["2x2", "2x3", "2x4"]
)
@pytest.mark.parametrize("shape, rule", RULES)
def test_no_layout_is_nearer_than_the_nearest(mesh, shape, rule):
    """Compares with the layouts, in all orders, that keep replicated axes and do not shard dims of one element.

    Distance is the number of elements that the busiest rank needs and lacks, counted on the whole tensor.
    """
    every = every_layout(mesh, len(shape), partials=())
    where = torch.arange(math.prod(shape)).reshape(shape)
    held = {
        layout: {rank: set(part.flatten().tolist()) for rank, part in split(where, layout).items()} for layout in every
    }
    taken = []
    for layout in every:
        with contextlib.suppress(LayoutError):
            rule(layout)
            taken.append(layout)
    for layout in set(every) - set(taken):
        if any(shape[dim] == 1 for dim in layout.shard_order):
            continue
        lacks = {
            other: max(len(held[other][rank] - held[layout][rank]) for rank in mesh.ranks)
            for other in taken
            if all(layout[axis] != Replicate() or other[axis] == Replicate() for axis in mesh.axis_names)
            and all(shape[dim] > 1 for dim in other.shard_order)
        }
        with pytest.raises(LayoutError) as refused:
            rule(layout)
        (near,) = refused.value.nearest
        assert lacks[near] == min(lacks.values()), (
            f"({layout}) is nearer to ({min(lacks, key=lacks.get)}) than to ({near})"
        )
