"""Every op on DTensors in every layout: a LayoutError with its remedy, or torch's result on whole tensors."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.models.train.measure import CollectiveCount
from weft.reshard import layout_of
from weft.reshard.moving.dtensor import wrap

from tests.kernels.cases import (
    FOUR,
    GRID,
    TWO,
    assert_names_a_remedy,
    told,
    upstream_of,
    whole,
)
from tests.kernels.sharded_cases import CASES, Case
from tests.support.collectives import Collectives
from tests.support.shards import split

MESHES = [pytest.param(TWO, id="2"), pytest.param(FOUR, id="4"), pytest.param(GRID, id="2x2")]


def layouts_of(mesh: ProcessMesh, ndim: int) -> list[Layout]:
    """Every layout over {R, S(i), P(sum)}, the mesh's first axis major where two shard one dim."""
    options = [Replicate(), *map(Shard, range(ndim)), Partial("sum")]
    return [Layout(mesh, placements) for placements in itertools.product(options, repeat=mesh.ndim)]


def upstream_layouts(output: Layout, ndim: int) -> list[Layout]:
    """All layouts on a 1-D mesh; else, per axis, the output's placement, and Partial where the output is replicated."""
    if output.mesh.ndim == 1:
        return layouts_of(output.mesh, ndim)
    choices = [
        [Replicate()] if isinstance(p, Partial) else [p] if isinstance(p, Shard) else [p, Partial("sum")]
        for p in output.placements
    ]
    return [Layout(output.mesh, placements) for placements in itertools.product(*choices)]


def part(whole: Tensor, layout: Layout) -> DTensor:
    """This rank's part, in memory of its own; a Partial has other addends on every rank."""
    own = split(whole, layout)[dist.get_rank()].clone(memory_format=torch.contiguous_format)
    return wrap(own, layout, whole.shape)


def attempt(function: Callable[[], object]) -> object:
    """The function's result, or the text of its LayoutError."""
    try:
        return function()
    except LayoutError as error:
        return str(error)


def every_layout_of(name: str, mesh: ProcessMesh) -> dict[str, object]:
    """For each combination of input layouts: an error, or the output.

    With an output come, for each upstream layout, an error or the gradients. All are local parts.
    """
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
        for grad_layout in upstream_layouts(layout_of(output), output.ndim) if wanted else ():
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
    if not wanted:  # an op on integers
        return output, []
    return output.detach(), list(torch.autograd.grad(output, wanted, upstream_of(output.shape)))


def linear_in_grad(case: Case, layouts: list[Layout], axis: str) -> bool:
    """Whether a Partial gradient must be taken on `axis`: every operand is whole there."""
    return all(layout[axis] == Replicate() for layout in layouts)


# How many of the combinations an op takes on a 1-D mesh, counted by hand from its docstring.
TAKEN = {
    "linear": 7,  # (R S0 S1 P, R), (R, S0), (S2, S1), (R, P)
    "linear-bias": 6,  # the same with one token dim less, each with the bias that fits
    "linear-relu": 3,  # layouts whose output is no sum: (R S0, R, R), (R, S0, S0)
    "linear-of-silu": 5,  # layouts whose input is no sum: (R S0, R), (R, S0), (S1, S1), (R, P)
    "matmul": 6,  # (R S0 P, R), (R, S1 P), (S1, S0), each with the residual that fits
    "matmul-batch": 7,  # (R P, R), (S0, S0), (S1, R), (R, S2 P), (S2, S1)
    "qkv_linear": 6,  # the same as linear-bias
    "qkv_linear-rope": 3,  # (R, R), (R, S0) by whole heads, and (S0, R) with the tables'
    "swiglu_linear": 3,  # (R S0, R, R), (R, S0, S0)
    "experts": 3,  # (R S0, R, R), (R, S1, S2)
    "grouped_matmul": 6,  # (R P, R), (R, S0), (R, S2), (R, P), (S1, S1)
    "grouped_matmul-relu": 3,  # (R, R), (R, S0), (R, S2), each with the bias that fits
    "grouped_matmul-residual": 6,  # the same as grouped_matmul, each with the residual that fits
    "route": 3,  # R S0 S1
    "dispatch": 5,  # (R S2 P, R), (S0, S0), (S1, S1)
    "combine": 4,  # (R S1 P, R, R), (S0, S0, S0)
    "router_statistics": 3,  # (R, R), (S0, S0), (S1, S1)
    "router_statistics-next": 2,  # (R, R, R), (S0, S0, P)
    "router_statistics-load": 3,  # (R, R, R), (S0, S0, S0), (S1, S1, R)
    "sequence_load": 3,  # R S0 S1
    "embedding": 6,  # (R S0 S1, R), (R, S0), (R, S1), (R, P)
    "embedding-padding": 6,
    "rms_norm-no-weight": 3,  # R S0 S1
    "rms_norm": 3,  # R S0 S1
    "rms_norm-heads": 4,  # R S0 S1, and S2 by whole heads
    "layer_norm": 3,  # R S0 S1
    "add_rms_norm": 2,  # R S0
    "add_layer_norm": 2,
    "rms_norm_rope": 3,  # R, S1 by whole heads, and S0 with the tables'
    "rope-interleaved": 3,
    "rope": 4,  # R S0 S2, and S1 with the tables'
    "rope-rows": 4,  # (R, R), (S0, S0), (S1, S1), (S2, R)
    "attention": 4,  # R S0 S2, and the queries S1 alone
    "swiglu": 3,  # R S0 S1
    "geglu": 3,
    "gelu": 3,
    "add-repeated": 4,  # (R, R), (S0, R), (S1, S0), (S2, S1)
    "add": 5,  # R S0 S1 S2 P
    "dropout": 5,  # the same
    "dropout-residual": 5,
    "cross_entropy-none": 4,  # R S0 S1 S2
    "cross_entropy-mean": 4,
    "cross_entropy-sum": 4,
    "cross_entropy-weighted-mean": 4,
    "linear_cross_entropy-none": 3,  # (R, R, R), (R, S0, R), (S0, R, S0)
    "linear_cross_entropy-mean": 3,
    "linear_cross_entropy-bias": 2,  # (R, R, R), (R, S0, S0)
}


# The remaining ops take up to half a minute on 2x2, for their many operands.
QUICK = ("add", "cross_entropy-mean", "swiglu")


@pytest.mark.few(2)
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
