"""Every op on DTensors in every layout: a LayoutError with its remedy, or what torch gives on whole tensors."""

import itertools
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
from weft import kernels
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.models.train.observe import CollectiveCount
from weft.reshard import layout_of
from weft.reshard.running.dtensor import wrap

from tests.kernels.cases import (
    FOUR,
    GRID,
    TWO,
    assert_names_a_remedy,
    ints,
    normal,
    told,
    torch_cross_entropy,
    upstream_of,
    whole,
)
from tests.support import philox
from tests.support.collectives import Collectives
from tests.support.shards import split

MESHES = [pytest.param(TWO, id="2"), pytest.param(FOUR, id="4"), pytest.param(GRID, id="2x2")]


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair as a complex number, times exp(i angle)."""
    pairs = x.unflatten(-1, (-1, 2, cos.shape[-1])).transpose(-1, -2)  # [..., T, heads, D / 2, 2]
    angle = torch.complex(cos, sin).unsqueeze(-2)  # [..., T, 1, D / 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    return turned.transpose(-1, -2).flatten(-3)


def attend(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(-3, -2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(-3, -2).flatten(-2)


def drop(x: Tensor) -> Tensor:
    keep = philox.bits(torch.arange(x.numel()).reshape(x.shape), 7) >= 2**30
    return x * keep / 0.75


def cross_entropy_collectives(reduction: str, logits: Layout, target: Layout) -> list[str]:
    """What the docstring declares: a gather where V is cut; "mean" counts over the axes that cut the tokens."""
    counted = reduction == "mean" and bool(target.shard_order)
    return ["all-reduce"] * counted + ["all-gather"] * bool(logits.shard_order.get(logits_dims - 1))


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options: object) -> Tensor:
    return kernels.linear_cross_entropy(x, weight, target, **options)


def linear_cross_entropy_collectives(reduction: str, x: Layout, weight: Layout, target: Layout) -> list[str]:
    """A gather a chunk of two of this rank's tokens where V is cut; "mean" counts over the axes that cut the tokens."""
    tokens = x.local_shape((N, 3), dist.get_rank())[0]
    gathers = bool(weight.shard_order.get(0)) * -(-tokens // 2)
    return ["all-reduce"] * (reduction == "mean" and bool(target.shard_order)) + ["all-gather"] * gathers


def by_group(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """The last row is of no group."""
    bias = torch.zeros(3, 7, dtype=a.dtype) if bias is None else bias
    return torch.cat([a[:2] @ b[0] + bias[0], a[2:4] @ b[2] + bias[2], torch.zeros(1, 7, dtype=a.dtype)])


# The sizes are uneven over 2 and leave an empty shard over 4, but for heads.
B, T, V, H, N = 3, 5, 5, 6, 5
logits_dims = 3
ANGLE = torch.outer(torch.arange(T).double(), torch.tensor([1.0, 0.3]).double())  # [T, D / 2]
TARGET = torch.where(ints(3, B, T) == 0, -100, ints(V, B, T))
ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
CASES = {
    "linear": Case(kernels.linear, F.linear, (normal(B, T, 5), normal(7, 5))),
    "linear-bias": Case(kernels.linear, F.linear, (normal(B, 5), normal(7, 5), normal(7))),
    "linear-relu": Case(
        partial(kernels.linear, activation="relu"),
        lambda *t: F.linear(*t).relu(),
        (normal(B, 5), normal(7, 5), normal(7)),
    ),
    "linear-of-silu": Case(
        partial(kernels.linear, input_activation="silu"),
        lambda x, w: F.linear(F.silu(x), w),
        (normal(B, 5), normal(7, 5)),
    ),
    "matmul": Case(
        lambda a, b, residual: kernels.matmul(a, b, residual=residual, alpha=0.5, beta=2.0),
        lambda a, b, residual: a @ b / 2 + 2 * residual,
        (normal(B, 5), normal(5, 7), normal(B, 7)),
    ),
    "matmul-batch": Case(kernels.matmul, torch.matmul, (normal(B, T, 5), normal(B, 5, 7))),
    "swiglu_linear": Case(
        kernels.swiglu_linear,
        lambda x, gate, up: F.silu(x @ gate.T) * (x @ up.T),
        (normal(B, 5), normal(7, 5), normal(7, 5, seed=1)),
    ),
    "grouped_matmul": Case(kernels.grouped_matmul, by_group, (normal(5, 6), normal(3, 6, 7), ENDS)),
    "grouped_matmul-relu": Case(
        lambda a, b, bias: kernels.grouped_matmul(a, b, ENDS, bias=bias, activation="relu"),  # plain offsets are whole
        lambda a, b, bias: by_group(a, b, ENDS, bias).relu(),
        (normal(5, 6), normal(3, 6, 7), normal(3, 7)),
    ),
    "grouped_matmul-residual": Case(
        lambda a, b, residual: kernels.grouped_matmul(a, b, ENDS, residual=residual, alpha=0.5, beta=2.0),
        lambda a, b, residual: by_group(a, b, ENDS) / 2 + 2 * residual * (torch.arange(5) < ENDS[-1])[:, None],
        (normal(5, 6), normal(3, 6, 7), normal(5, 7)),
    ),
    "embedding": Case(kernels.embedding, F.embedding, (ints(V, B, T), normal(V, H))),
    "embedding-padding": Case(
        partial(kernels.embedding, padding_idx=-2),
        partial(F.embedding, padding_idx=-2),
        (ints(V, B, T), normal(V, H)),
    ),
    "rms_norm-no-weight": Case(
        lambda x: kernels.rms_norm(x, eps=1e-5), lambda x: F.rms_norm(x, (H,), None, 1e-5), (normal(B, T, H),)
    ),
    "rms_norm": Case(
        partial(kernels.rms_norm, eps=1e-5),
        lambda x, weight: F.rms_norm(x, (H,), weight, 1e-5),
        (normal(B, T, H), normal(H)),
    ),
    "rms_norm-heads": Case(
        partial(kernels.rms_norm, eps=1e-5, head_dim=4),
        lambda x, weight: F.rms_norm(x.unflatten(-1, (4, 4)), (4,), weight, 1e-5).flatten(-2),
        (normal(B, T, 16), normal(4)),
    ),
    "layer_norm": Case(
        kernels.layer_norm, lambda x, *w: F.layer_norm(x, (H,), *w), (normal(B, T, H), normal(H), normal(H, seed=1))
    ),
    "rope": Case(kernels.rope, rotate, (normal(B, T, 16), ANGLE.cos(), ANGLE.sin()), (1, 2)),
    "rope-rows": Case(
        kernels.rope,
        rotate,
        (normal(B, T, 16), *(torch.stack([f(ANGLE * (row + 1)) for row in range(B)]) for f in (torch.cos, torch.sin))),
        (1, 2),
    ),
    "attention": Case(
        partial(kernels.attention, head_dim=2),
        partial(attend, head_dim=2),
        (normal(B, T, 16), normal(B, T, 8), normal(B, T, 8, seed=1)),
    ),
    "swiglu": Case(kernels.swiglu, lambda gate, up: F.silu(gate) * up, (normal(B, T), normal(B, T, seed=1))),
    "gelu": Case(partial(kernels.gelu, approximate="tanh"), partial(F.gelu, approximate="tanh"), (normal(B, T),)),
    "add-repeated": Case(kernels.add, operator.add, (normal(B, T, H), normal(T, H))),
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
    **{
        f"linear_cross_entropy-{reduction}": Case(
            partial(linear_cross_entropy, reduction=reduction, chunk_tokens=2),
            lambda x, weight, target, reduction=reduction: torch_cross_entropy(
                F.linear(x, weight), target, reduction=reduction
            ),
            (normal(N, 3), normal(V, 3), ints(V, N)),
            communicates=partial(linear_cross_entropy_collectives, reduction),
        )
        for reduction in ("none", "mean")
    },
    "linear_cross_entropy-bias": Case(
        lambda x, weight, bias: linear_cross_entropy(x, weight, ints(V, N), linear_bias=bias, denominator=4.0),
        lambda x, weight, bias: torch_cross_entropy(F.linear(x, weight, bias), ints(V, N), reduction="sum") / 4,
        (normal(N, 3), normal(V, 3), normal(V)),
        communicates=lambda x, weight, bias: ["all-gather"] * bool(weight.shard_order.get(0)),
    ),
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
            assert seen.kinds == [], (key, seen.kinds)
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
    "linear-relu": 3,  # those whose output is no sum: (R S0, R, R), (R, S0, S0)
    "linear-of-silu": 5,  # those whose input is no sum: (R S0, R), (R, S0), (S1, S1), (R, P)
    "matmul": 6,  # (R S0 P, R), (R, S1 P), (S1, S0), each with the residual that fits
    "matmul-batch": 7,  # (R P, R), (S0, S0), (S1, R), (R, S2 P), (S2, S1)
    "swiglu_linear": 3,  # (R S0, R, R), (R, S0, S0)
    "grouped_matmul": 6,  # (R P, R), (R, S0), (R, S2), (R, P), (S1, S1)
    "grouped_matmul-relu": 3,  # (R, R), (R, S0), (R, S2), each with the bias that fits
    "grouped_matmul-residual": 6,  # those of grouped_matmul, each with the residual that fits
    "embedding": 6,  # (R S0 S1, R), (R, S0), (R, S1), (R, P)
    "embedding-padding": 6,
    "rms_norm-no-weight": 3,  # R S0 S1
    "rms_norm": 3,  # R S0 S1
    "rms_norm-heads": 4,  # R S0 S1, and S2 by whole heads
    "layer_norm": 3,  # R S0 S1
    "rope": 4,  # R S0 S2, and S1 with the tables'
    "rope-rows": 4,  # (R, R), (S0, S0), (S1, S1), (S2, R)
    "attention": 4,  # R S0 S2, and the queries S1 alone
    "swiglu": 3,  # R S0 S1
    "gelu": 3,  # R S0 S1
    "add-repeated": 4,  # (R, R), (S0, R), (S1, S0), (S2, S1)
    "add": 5,  # R S0 S1 S2 P
    "dropout": 5,  # the same
    "cross_entropy-none": 4,  # R S0 S1 S2
    "cross_entropy-mean": 4,
    "cross_entropy-sum": 4,
    "cross_entropy-weighted-mean": 4,
    "linear_cross_entropy-none": 3,  # (R, R, R), (R, S0, R), (S0, R, S0)
    "linear_cross_entropy-mean": 3,
    "linear_cross_entropy-bias": 2,  # (R, R, R), (R, S0, S0)
}


# The others take up to half a minute on 2x2, for their many operands.
QUICK = ("add", "cross_entropy-mean", "swiglu")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name, *mesh.values, id=f"{name}-{mesh.id}",
            marks=[pytest.mark.exhaustive] * ((mesh.id == "2") == (name in QUICK)),
        )
        for name in CASES
        for mesh in MESHES
    ],
)  # fmt: skip
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
