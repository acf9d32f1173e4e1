"""Every op on DTensors in every layout: a LayoutError with its remedy, or what torch gives on whole tensors."""

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weft import kernels
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.models.train.observe import CollectiveCount
from weft.reshard import distribute, layout_of, reshard, to_global
from weft.reshard.dtensor import wrap

from tests.support import philox
from tests.support.collectives import Collectives
from tests.support.shards import rebuild, split

TWO, FOUR = ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=4)
GRID = ProcessMesh.grid(dp=2, tp=2)
MESHES = [pytest.param(TWO, id="2"), pytest.param(FOUR, id="4"), pytest.param(GRID, id="2x2")]
REMEDY = r"reshard|give it a layout with distribute\(\)|sizes that work"


@dataclass(frozen=True)
class Case:
    """An op on whole tensors, and what torch says it is. Floats take gradients, `constants` and ints do not."""

    op: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    constants: tuple[int, ...] = ()
    communicates: Callable[..., list[str]] = field(default=lambda *layouts: [])  # in forward, from the layouts

    def needs_grad(self, i: int) -> bool:
        return self.tensors[i].is_floating_point() and i not in self.constants


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ints(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair as a complex number, times exp(i angle)."""
    pairs = x.unflatten(-1, (-1, 2, cos.shape[-1])).transpose(-1, -2)  # [..., T, heads, D / 2, 2]
    angle = torch.complex(cos, sin).unsqueeze(-2)  # [T, 1, D / 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    return turned.transpose(-1, -2).flatten(-3)


def attend(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(-3, -2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(-3, -2).flatten(-2)


def drop(x: Tensor) -> Tensor:
    keep = philox.bits(torch.arange(x.numel()).reshape(x.shape), 7) >= 2**30
    return x * keep / 0.75


def torch_cross_entropy(logits: Tensor, target: Tensor, **options: object) -> Tensor:
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)  # type: ignore[arg-type]
    return loss.view(target.shape) if options["reduction"] == "none" else loss


def cross_entropy_collectives(reduction: str, logits: Layout, target: Layout) -> list[str]:
    """What the docstring declares: a gather per axis over V; "mean" counts over the axes that cut the tokens."""
    counted = reduction == "mean" and bool(target.shard_order)
    return ["all-reduce"] * counted + ["all-gather"] * len(logits.shard_order.get(logits_dims - 1, ()))


# The sizes are uneven over 2 and leave an empty shard over 4, but for heads.
B, T, V, H = 3, 5, 5, 6
logits_dims = 3
ANGLE = torch.outer(torch.arange(T).double(), torch.tensor([1.0, 0.3]).double())  # [T, D / 2]
TARGET = torch.where(ints(3, B, T) == 0, -100, ints(V, B, T))
CASES = {
    "linear": Case(kernels.linear, F.linear, (normal(B, T, 5), normal(7, 5))),
    "linear-bias": Case(kernels.linear, F.linear, (normal(B, 5), normal(7, 5), normal(7))),
    "embedding": Case(kernels.embedding, F.embedding, (ints(V, B, T), normal(V, H))),
    "rms_norm": Case(
        partial(kernels.rms_norm, eps=1e-5),
        lambda x, weight: F.rms_norm(x, (H,), weight, 1e-5),
        (normal(B, T, H), normal(H)),
    ),
    "rope": Case(kernels.rope, rotate, (normal(B, T, 16), ANGLE.cos(), ANGLE.sin()), (1, 2)),
    "attention": Case(
        partial(kernels.attention, head_dim=2),
        partial(attend, head_dim=2),
        (normal(B, T, 16), normal(B, T, 8), normal(B, T, 8, seed=1)),
    ),
    "swiglu": Case(kernels.swiglu, lambda gate, up: F.silu(gate) * up, (normal(B, T), normal(B, T, seed=1))),
    "add": Case(kernels.add, operator.add, (normal(B, T, H), normal(B, T, H, seed=1))),
    "dropout": Case(partial(kernels.dropout, p=0.25, key=7), drop, (normal(B, T, H),)),
    **{
        f"cross_entropy-{reduction}": Case(
            partial(kernels.cross_entropy, reduction=reduction),
            partial(torch_cross_entropy, reduction=reduction),
            (normal(B, T, V), TARGET),
            communicates=partial(cross_entropy_collectives, reduction),
        )
        for reduction in ("none", "mean", "sum")
    },
    "cross_entropy-weighted-mean": Case(
        partial(kernels.cross_entropy, weight=normal(V).abs(), label_smoothing=0.2),
        partial(torch_cross_entropy, weight=normal(V).abs(), label_smoothing=0.2, reduction="mean"),
        (normal(B, T, V), TARGET),
        communicates=partial(cross_entropy_collectives, "mean"),
    ),
}


def layouts_of(mesh: ProcessMesh, ndim: int) -> list[Layout]:
    """Every layout over {R, S(i), P(sum)}, the mesh's first axis major where two shard one dim."""
    options = [Replicate(), *map(Shard, range(ndim)), Partial("sum")]
    return [Layout(mesh, placements) for placements in itertools.product(options, repeat=mesh.ndim)]


def upstream_layouts(output: Layout, ndim: int) -> list[Layout]:
    """All on a 1-D mesh; on others, per axis the natural one, and Partial where the output is whole."""
    if output.mesh.ndim == 1:
        return layouts_of(output.mesh, ndim)
    choices = [
        [Replicate()] if isinstance(p, Partial) else [p] if isinstance(p, Shard) else [p, Partial("sum")]
        for p in output.placements
    ]
    return [Layout(output.mesh, placements) for placements in itertools.product(*choices)]


def upstream_of(shape: torch.Size) -> Tensor:
    return normal(*shape, seed=7)


def part(whole: Tensor, layout: Layout) -> DTensor:
    """This rank's part; a Partial has other addends on every rank."""
    return wrap(split(whole, layout)[dist.get_rank()].contiguous(), layout, whole.shape)


def attempt(function: Callable[[], object]) -> object:
    """What the function returns, or the text of its LayoutError."""
    try:
        return function()
    except LayoutError as error:
        return str(error)


def every_layout_of(name: str, mesh: ProcessMesh) -> dict[str, object]:
    """By input layouts: an error, or the output and, by upstream layout, an error or the gradients. Local parts."""
    case = CASES[name]
    inputs = [
        [part(whole, layout).requires_grad_(case.needs_grad(i)) for layout in layouts_of(mesh, whole.ndim)]
        for i, whole in enumerate(case.tensors)
    ]
    results: dict[str, object] = {}
    for tensors in itertools.product(*inputs):
        layouts = [layout_of(tensor) for tensor in tensors]
        with Collectives() as seen, CollectiveCount() as count:
            output = attempt(lambda tensors=tensors: case.op(*tensors))
        key = " | ".join(map(str, layouts))
        results[key] = output
        if not isinstance(output, Tensor):
            assert seen.kinds == [] or name.endswith("-mean"), (key, seen.kinds)
            continue
        assert sorted(seen.kinds) == sorted(case.communicates(*layouts)), (key, seen.kinds)
        assert count.issued.total() == len(seen.kinds), (key, count.issued)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        gradients = {}
        for grad_layout in upstream_layouts(layout_of(output), output.ndim):
            grad = part(upstream_of(output.shape), grad_layout)
            with Collectives() as seen:
                found = attempt(lambda o=output, w=wanted, g=grad: torch.autograd.grad(o, w, g, retain_graph=True))
            assert seen.kinds == [], (key, str(grad_layout), seen.kinds)
            gradients[str(grad_layout)] = found if isinstance(found, str) else [told(tensor) for tensor in found]
        results[key] = told(output), gradients
    return results


def told(tensor: DTensor) -> tuple[str, object]:
    return str(layout_of(tensor)), tensor.detach().to_local().numpy()


def whole(parts: list[tuple[str, object]], mesh: ProcessMesh, shape: torch.Size) -> Tensor:
    """The tensor that the ranks' parts make; asserts that they agree on the layout, and that replicas are bitwise equal."""
    (layout,) = {text for text, _ in parts}
    return rebuild(
        {rank: torch.from_numpy(local) for rank, (_, local) in enumerate(parts)}, Layout(mesh, layout), shape
    )


def dense(case: Case) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.clone().requires_grad_(case.needs_grad(i)) for i, tensor in enumerate(case.tensors)]
    output = case.oracle(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return output.detach(), list(torch.autograd.grad(output, wanted, upstream_of(output.shape)))


def linear_in_grad(case: Case, layouts: list[Layout], axis: str) -> bool:
    """Whether a Partial gradient must be taken on `axis`: every operand is whole there."""
    return all(layout[axis] == Replicate() for layout in layouts)


# How many of the combinations an op takes on a 1-D mesh, counted by hand from its docstring.
TAKEN = {
    "linear": 7,  # (R S0 S1 P, R), (R, S0), (S2, S1), (R, P)
    "linear-bias": 6,  # the same with one token dim less, and the one bias that fits each
    "embedding": 6,  # (R S0 S1, R), (R, S0), (R, S1), (R, P)
    "rms_norm": 3,  # R S0 S1
    "rope": 3,  # R S0 S2
    "attention": 3,  # R S0 S2
    "swiglu": 3,  # R S0 S1
    "add": 5,  # R S0 S1 S2 P
    "dropout": 5,  # the same
    "cross_entropy-none": 4,  # R S0 S1 S2
    "cross_entropy-mean": 4,
    "cross_entropy-sum": 4,
    "cross_entropy-weighted-mean": 4,
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_in_every_layout_an_op_is_right_without_communication_or_names_the_remedy(pool, name, mesh):
    case = CASES[name]
    output, gradients = dense(case)
    by_rank = pool.run(every_layout_of, name, mesh, ranks=mesh.size)
    taken = 0
    for key, first in by_rank[0].items():
        results = [results[key] for results in by_rank]
        if isinstance(first, str):
            assert all(isinstance(result, str) for result in results), key
            assert_names_a_remedy(first)
            continue
        taken += 1
        found = whole([result[0] for result in results], mesh, output.shape)
        torch.testing.assert_close(found, output, msg=lambda text, key=key: f"{key}: {text}")
        layouts = [Layout(mesh, text) for text in key.split(" | ")]
        check_gradients(case, layouts, [result[1] for result in results], Layout(mesh, first[0][0]), gradients)
    assert taken == TAKEN[name] ** mesh.ndim


def check_gradients(case, layouts, by_rank, output, expected):
    mesh = output.mesh
    for text in by_rank[0]:
        found = [results[text] for results in by_rank]
        grad = Layout(mesh, text)
        natural = [
            grad[axis] == (Replicate() if isinstance(output[axis], Partial) else output[axis])
            or (grad[axis] == Partial("sum") and linear_in_grad(case, layouts, axis))
            for axis in mesh.axis_names
        ]
        if isinstance(found[0], str):
            assert not all(natural), (list(map(str, layouts)), text, found[0])
            assert_names_a_remedy(found[0])
            continue
        for i, wanted in enumerate(expected):
            tensor = whole([gradients[i] for gradients in found], mesh, wanted.shape)
            torch.testing.assert_close(tensor, wanted, msg=lambda t, i=i, g=text: f"{layouts}, {g}, operand {i}: {t}")


def assert_names_a_remedy(message):
    import re

    assert re.search(REMEDY, message), message


# Cross-entropy over vocabularies that do not divide


class Gathers(TorchDispatchMode):
    """Bytes that each all-gather leaves on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in func.__name__:
            self.nbytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def vocab_parallel(mesh, placements, classes, tokens, dtype):
    """The loss and the gradient of the logits, whole, and the bytes of the gathers."""
    layout = Layout(mesh, placements)
    logits = normal(*tokens, classes).to(dtype)
    target = ints(classes, *tokens)
    rows = layout.replace(**dict.fromkeys(layout.shard_order.get(len(tokens), ()), "R"))
    x = distribute(logits, layout).requires_grad_()
    with Gathers() as gathers:
        loss = kernels.cross_entropy(x, distribute(target, rows), reduction="none")
    with Collectives() as seen:
        loss.backward(distribute(upstream_of(loss.shape).float(), layout_of(loss)))
    assert seen.kinds == []
    return told(loss), told(x.grad.float()), gathers.nbytes


@pytest.mark.parametrize(
    "mesh, placements",
    [
        pytest.param(TWO, "tp: S(2)", id="2"),
        pytest.param(FOUR, "tp: S(2)", id="4"),
        pytest.param(GRID, "dp: S(0), tp: S(2)", id="2x2-tokens-and-vocabulary"),
        pytest.param(GRID, "dp: S(2), tp: S(2)", id="2x2-both-on-the-vocabulary"),
    ],
)
@pytest.mark.parametrize("classes", [1, 5, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_vocab_parallel_loss_gathers_12_bytes_per_token_and_rank_once_per_axis(pool, mesh, placements, classes, dtype):
    tokens, layout = (4, 3), Layout(mesh, placements)
    logits = normal(*tokens, classes).to(dtype).double().requires_grad_()
    expected = torch_cross_entropy(logits, ints(classes, *tokens), reduction="none")
    expected.backward(upstream_of(expected.shape))
    results = pool.run(vocab_parallel, mesh, placements, classes, tokens, dtype, ranks=mesh.size)
    loss = whole([result[0] for result in results], mesh, expected.shape)  # bitwise equal over the replicas
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    grad = whole([result[1] for result in results], mesh, logits.shape)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(grad.double(), logits.grad, **near)
    axes = layout.shard_order[2]
    sizes = [mesh.axis_size(axis) for axis in reversed(axes)]
    for rank, (_, _, nbytes) in enumerate(results):
        here = math.prod(layout.local_shape(logits.shape, rank)[:-1])
        assert nbytes == [12 * here * math.prod(sizes[: i + 1]) for i in range(len(sizes))]


# One by one: what broke others, mixing, ranks outside


def partial_bias():
    """Row-parallel: each rank has a part of the sum, and the bias is in it once."""
    x, weight, bias = normal(3, 8), normal(5, 8), normal(5)
    row = [distribute(x, Layout(FOUR, "tp: S(1)")), distribute(weight, Layout(FOUR, "tp: S(1)"))]
    b = distribute(bias, Layout(FOUR)).requires_grad_()
    output = kernels.linear(*row, b)
    assert layout_of(output) == Layout(FOUR, "tp: P(sum)")
    whole = reshard(output)
    torch.testing.assert_close(whole.to_local(), F.linear(x, weight, bias))
    whole.backward(distribute(upstream_of(whole.shape), Layout(FOUR)))
    assert layout_of(b.grad) == Layout(FOUR)
    torch.testing.assert_close(b.grad.to_local(), upstream_of(whole.shape).sum(0))
    try:
        kernels.linear(*row, distribute(bias, Layout(FOUR, "tp: P(sum)")))
    except LayoutError as error:
        return str(error)


def test_anchor_17_a_bias_on_a_partial_is_added_once(pool):
    for message in pool.run(partial_bias):
        assert "reshard the bias to (tp: R)" in message


def gradients_through_a_reduction():
    """Row-parallel, reduced, then used differently on each rank: every rank's part of the gradient comes back."""
    x, weight = normal(3, 8), normal(4, 8)
    a = distribute(x, Layout(TWO, "tp: S(1)")).requires_grad_()
    b = distribute(weight, Layout(TWO, "tp: S(1)"))
    c = distribute(normal(6, 4), Layout(TWO, "tp: S(0)"))
    inside = reshard(reshard(kernels.linear(a, b)))  # the second moves nothing forward, and reduces backward
    output = kernels.linear(inside, c)
    output.backward(distribute(upstream_of(output.shape), layout_of(output)))
    torch.testing.assert_close(to_global(a.grad), upstream_of(output.shape) @ normal(6, 4) @ weight)


def test_anchor_12_no_gradient_is_lost_behind_a_reduction(pool):
    pool.run(gradients_through_a_reduction, ranks=2)


def data_parallel_loss(target):
    """The mean loss of the global batch, tokens cut over dp, and the gradient of the logits."""
    layout = Layout(FOUR, "tp: S(0)")
    logits = distribute(normal(*target.shape, 7), layout).requires_grad_()
    loss = reshard(kernels.cross_entropy(logits, distribute(target, layout)))
    loss.backward()
    return float(loss.to_local()), to_global(logits.grad)


@pytest.mark.parametrize("ignored", [0, 1, 3], ids=["none-ignored", "a-rank-all-ignored", "one-rank-left"])
def test_anchors_8_and_17_the_logged_loss_is_the_mean_over_all_tokens(pool, ignored):
    target = ints(7, 4, 3)
    target[:ignored] = -100
    logits = normal(4, 3, 7).requires_grad_()
    expected = torch_cross_entropy(logits, target, reduction="mean")
    expected.backward()
    for loss, grad in pool.run(data_parallel_loss, target):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(grad, logits.grad)


def mixed():
    """Plain tensors count as replicated, their gradients are plain, and one that would be Partial is refused."""
    x, weight, bias = normal(3, 8), normal(6, 8), normal(6)
    sharded, row = distribute(x, Layout(TWO, "tp: S(0)")), distribute(weight, Layout(TWO, "tp: S(0)"))
    torch.testing.assert_close(to_global(kernels.linear(sharded, weight, bias)), F.linear(x, weight, bias))
    torch.testing.assert_close(to_global(kernels.linear(x, row)), F.linear(x, weight))

    leaf = weight.clone().requires_grad_()
    output = kernels.linear(distribute(x, Layout(TWO)), leaf, distribute(bias, Layout(TWO)))
    output.backward(distribute(upstream_of(output.shape), Layout(TWO)))
    assert type(leaf.grad) is Tensor
    torch.testing.assert_close(leaf.grad, upstream_of(output.shape).T @ x)

    messages = []
    for tensors in ((sharded, leaf), (x.clone().requires_grad_(), row)):
        output = kernels.linear(*tensors)
        with pytest.raises(LayoutError) as caught:
            output.backward(distribute(upstream_of(output.shape), layout_of(output)))
        messages.append(str(caught.value))
    assert output.grad_fn is not None
    return messages


def test_plain_tensors_beside_dtensors(pool):
    for first, second in pool.run(mixed, ranks=2):
        assert "linear: a plain tensor of shape (6, 8)" in first
        assert "(tp: P(sum)); give it a layout with distribute()" in first
        assert "linear: a plain tensor of shape (3, 8)" in second


def two_meshes():
    """Operands on two meshes, of the same sizes even."""
    other = TWO.rename(tp="dp")
    x, H = normal(3, 4), normal(4)
    messages = []
    for op, tensors in (
        (kernels.linear, (x, normal(5, 4))),
        (kernels.rms_norm, (x, H)),
        (kernels.rope, (x, normal(3, 2), normal(3, 2))),
        (kernels.add, (x, x)),
        (kernels.swiglu, (x, x)),
        (partial(kernels.attention, head_dim=2), (x, x, x)),
        (kernels.embedding, (ints(3, 2), x)),
        (kernels.cross_entropy, (x, ints(4, 3))),
    ):
        first, *rest = tensors
        with pytest.raises(LayoutError) as caught:
            op(distribute(first, Layout(TWO)), *(distribute(tensor, Layout(other)) for tensor in rest))
        messages.append(str(caught.value))
    return messages


def test_operands_on_two_meshes_are_refused(pool):
    for messages in pool.run(two_meshes, ranks=2):
        for message in messages:
            assert_names_a_remedy(message)


def cut_heads():
    """Two key heads over four ranks."""
    layout = Layout(FOUR, "tp: S(2)")
    query, key = distribute(normal(1, 3, 16), layout), distribute(normal(1, 3, 8), layout)
    cos, sin = normal(3, 2), normal(3, 2)
    messages = []
    for function in (
        lambda: kernels.attention(query, key, key, head_dim=4),
        lambda: kernels.rope(key, cos, sin),
    ):
        with pytest.raises(LayoutError) as caught:
            function()
        messages.append(str(caught.value))
    return messages


def test_a_head_is_never_cut_and_the_sizes_that_work_are_named(pool):
    for attention, rope in pool.run(cut_heads):
        assert attention == "attention: " + rope.removeprefix("rope: ")
        assert "2 heads of 4" in rope and "sizes that work: 1, 2" in rope


def minor_axis_first():
    """Tokens cut by tp first, then dp: a shard order that its mesh says by the order of its axes."""
    swapped = GRID.permute("tp", "dp")
    x, weight = normal(7, 3), normal(4, 3)
    a = distribute(x, Layout(GRID, "tp: S(0), dp: S(0)")).requires_grad_()
    b = distribute(weight, Layout(swapped)).requires_grad_()
    output = kernels.linear(a, b)
    torch.testing.assert_close(to_global(output), F.linear(x, weight))
    output.backward(distribute(upstream_of(output.shape), layout_of(output)))
    torch.testing.assert_close(to_global(a.grad), upstream_of(output.shape) @ weight)
    torch.testing.assert_close(to_global(b.grad), upstream_of(output.shape).T @ x)
    classes = normal(2, 7)
    target = torch.tensor([3, 6])
    logits = distribute(classes, Layout(GRID, "tp: S(1), dp: S(1)"))
    loss = kernels.cross_entropy(logits, distribute(target, Layout(swapped)))
    torch.testing.assert_close(to_global(loss), F.cross_entropy(classes, target))


def test_a_shard_order_with_the_minor_axis_first(pool):
    pool.run(minor_axis_first)


OUTSIDE = {
    "linear": (kernels.linear, (normal(2, 4), normal(6, 4), normal(6)), ("tp: S(1)", "tp: S(1)", "")),
    "linear-plain-bias": (kernels.linear, (normal(2, 4), normal(6, 4), normal(6)), ("", "", None)),
    "embedding": (kernels.embedding, (ints(5, 2), normal(5, 4)), ("", "tp: S(0)")),
    "rms_norm": (kernels.rms_norm, (normal(2, 4), normal(4)), ("tp: S(0)", "")),
    "rope": (kernels.rope, (normal(2, 3, 8), normal(3, 2), normal(3, 2)), ("tp: S(2)", None, None)),
    "attention": (
        partial(kernels.attention, head_dim=2),
        (normal(1, 3, 8), normal(1, 3, 4), normal(1, 3, 4)),
        ("tp: S(2)",) * 3,
    ),
    "swiglu": (kernels.swiglu, (normal(2, 4), normal(2, 4)), ("tp: S(1)",) * 2),
    "add": (kernels.add, (normal(2, 4), normal(2, 4)), ("tp: P(sum)",) * 2),
    "dropout": (partial(kernels.dropout, p=0.25, key=7), (normal(2, 4),), ("tp: S(0)",)),
    "cross_entropy": (
        kernels.cross_entropy,
        (normal(4, 5).bfloat16(), torch.tensor([1, 4, -100, 0])),
        ("tp: S(1)", ""),
    ),
    "cross_entropy-tokens": (kernels.cross_entropy, (normal(4, 5).bfloat16(), ints(5, 4)), ("tp: S(0)", "tp: S(0)")),
}


def with_a_rank_outside(name):
    """Metadata and local sizes of the output and the gradients, and what this rank communicated."""
    op, wholes, placements = OUTSIDE[name]
    mesh = ProcessMesh([0, 2], ["tp"])
    tensors = [
        tensor.clone() if text is None else distribute(tensor, Layout(mesh, text))
        for tensor, text in zip(wholes, placements, strict=True)
    ]
    wanted = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point() and name != "rope"]
    if name == "rope":
        wanted = [tensors[0].requires_grad_()]
    with Collectives() as seen:
        output = op(*tensors)
        layout = layout_of(output)
        whole_there = layout.replace(**{a: "R" for a in mesh.axis_names if isinstance(layout[a], Partial)})
        output.backward(distribute(torch.ones(output.shape, dtype=output.dtype), whole_there))
    grads = [tensor.grad for tensor in wanted]
    described = [
        (tuple(t.shape), t.dtype, str(layout_of(t)), str(t.device)) for t in (output, *grads) if isinstance(t, DTensor)
    ]
    held = [t.to_local().numel() if isinstance(t, DTensor) else t for t in (output, *grads)]
    return described, held, seen.kinds


@pytest.mark.parametrize("name", OUTSIDE)
def test_paddle_58126_a_rank_outside_the_mesh_knows_all_and_does_nothing(pool, name):
    first, outside, last = pool.run(with_a_rank_outside, name, ranks=3)
    assert first[0] == outside[0] == last[0]
    assert all(held == 0 or held is None for held in outside[1])
    assert outside[2] == []
    assert all(isinstance(held, Tensor) or held > 0 for held in (*first[1], *last[1]))
