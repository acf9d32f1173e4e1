"""Every op, and reshard, under torch.compile(fullgraph=True): a single graph, with the eager values and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import add, cross_entropy, dropout, layer_norm, matmul, rms_norm, route
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.reshard import distribute, layout_of, reshard

from tests.kernels.cases import GRID, normal
from tests.kernels.test_incoming_gradients import OPS, laid_out
from tests.support.pool import Pool

Tensors = Sequence[list[Tensor]]


def same(found: Tensor, expected: Tensor) -> None:
    if isinstance(expected, DTensor):
        assert layout_of(found) == layout_of(expected)
        found, expected = found.to_local(), expected.to_local()
    torch.testing.assert_close(found, expected)


def compiles(run: Any, operands: Tensors) -> None:
    """Compares `run`, compiled and eager. run: maps lists of operands to an output for each list."""
    torch._dynamo.reset()
    found = []
    for way in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        leaves = [[operand.detach().requires_grad_() for operand in each] for each in operands]
        outputs = way(leaves)
        upstream = [torch.full_like(output, 2.0) for output in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, list(chain(*leaves)), upstream)])
    for compiled, eager in zip(*found, strict=True):
        same(compiled, eager)


def ops_compile(names: Sequence[str], mesh: ProcessMesh | None = None) -> None:
    """All the ops compile to a single graph."""
    runs, laid = [], []
    for name in names:
        run, ids, tensors = OPS[name]
        ids, operands = (ids, list(tensors)) if mesh is None else laid_out(name, mesh)
        runs.append(partial(run, ids))
        laid.append(operands)
    compiles(lambda operands: [run(*each) for run, each in zip(runs, operands, strict=True)], laid)


ALONE = [pytest.param((name,), id=name, marks=pytest.mark.exhaustive) for name in OPS]


@pytest.mark.parametrize("names", [pytest.param(("linear", "attention", "embedding"), id="a-few"), *ALONE])
def test_ops_on_plain_tensors(names: tuple[str, ...]) -> None:
    ops_compile(names)


@pytest.mark.parametrize("names", [pytest.param(("rms_norm",), id="a-norm"), *ALONE])
def test_ops_where_nothing_needs_a_gradient(names: tuple[str, ...]) -> None:
    """In grad mode, as a model in evaluation without `torch.no_grad()`: Dynamo cannot trace an op's autograd here."""
    torch._dynamo.reset()
    for name in names:
        run, ids, tensors = OPS[name]
        operands = [each.detach() for each in tensors]
        compiled = torch.compile(partial(run, ids), fullgraph=True, backend="aot_eager")
        same(compiled(*operands), run(ids, *operands))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x, number: rms_norm(x, None, number), id="rms_norm"),
        pytest.param(lambda x, number: layer_norm(x, None, None, number), id="layer_norm"),
        pytest.param(lambda x, number: add(x, x, alpha=number), id="add"),
        pytest.param(lambda x, number: matmul(x, x.mT, alpha=number, residual=x[:1, :1], beta=number), id="matmul"),
        pytest.param(lambda x, number: route(x, 2, scale=number)[1], id="route"),
        pytest.param(lambda x, number: cross_entropy(x, x.argmax(-1), label_smoothing=number), id="cross_entropy"),
        pytest.param(lambda x, number: dropout(x, number, torch.tensor(7, dtype=torch.uint64)), id="dropout"),
    ],
)
def test_numbers_may_be_symbols(call: Callable[[Tensor, float], Tensor]) -> None:
    torch._dynamo.reset()
    x = normal(4, 8).float()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for number in (0.125, 0.25, 0.5):
        torch.testing.assert_close(compiled(x, number), call(x, number))


@pytest.mark.parametrize("names", [pytest.param(("linear", "attention", "embedding"), id="a-few"), *ALONE])
def test_ops_on_dtensors(pool: Pool, names: tuple[str, ...]) -> None:
    pool.run(ops_compile, names, ProcessMesh.grid(tp=2), ranks=2)


FORMS: list[tuple[str, Any]] = [
    ("dp: R, tp: S(0)", None),
    ("dp: P(sum), tp: S(1)", "tp: S(0)"),
    ("dp: S(0)", {"tp": Shard(1)}),
    ("dp: S(0), tp: S(0)", [Replicate(), Shard(1)]),
    ("tp: P(sum)", (Shard(0), Replicate())),
]


def reshards() -> None:
    laid = [[distribute(normal(7, 5), Layout(GRID, src))] for src, _ in FORMS]
    forms = [placements for _, placements in FORMS]
    compiles(lambda xs: [reshard(x, placements=form) for (x,), form in zip(xs, forms, strict=True)], laid)


@pytest.mark.exhaustive
def test_reshard_by_every_form_of_placements(pool: Pool) -> None:
    pool.run(reshards)


def elsewhere() -> str:
    torch._dynamo.reset()
    x = distribute(normal(7, 5), Layout(GRID))
    with pytest.raises(Exception) as caught:
        torch.compile(lambda x: reshard(x, mesh=ProcessMesh.grid(tp=2)), fullgraph=True, backend="aot_eager")(x)
    return str(caught.value)


@pytest.mark.exhaustive
def test_reshard_to_another_mesh_is_refused_with_the_remedy(pool: Pool) -> None:
    for message in pool.run(elsewhere):
        assert "compiled code reshards by placements, on the tensor's mesh; call reshard outside" in message
