"""Every op, and reshard, under torch.compile(fullgraph=True): one graph, the values and layouts that there are without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.reshard import distribute, layout_of, reshard

from tests.kernels.cases import GRID, normal
from tests.kernels.test_incoming_gradients import OPS, laid_out
from tests.support.pool import Pool


def same(found: Tensor, expected: Tensor) -> None:
    if isinstance(expected, DTensor):
        assert layout_of(found) == layout_of(expected)
        found, expected = found.to_local(), expected.to_local()
    torch.testing.assert_close(found, expected)


def compiles(run: Any, operands: list[Tensor]) -> None:
    torch._dynamo.reset()
    found = []
    for way in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        output = way(*leaves)
        found.append([output, *torch.autograd.grad(output, leaves, torch.full_like(output, 2.0))])
    for compiled, eager in zip(*found, strict=True):
        same(compiled, eager)


@pytest.mark.parametrize("name", OPS)
def test_an_op_on_plain_tensors(name: str) -> None:
    run, ids, tensors = OPS[name]
    compiles(partial(run, ids), list(tensors))


def on_ranks() -> None:
    for run, ids, tensors in OPS.values():
        ids, laid = laid_out(ProcessMesh.grid(tp=2), ids, tensors)
        compiles(partial(run, ids), laid)


def test_ops_on_dtensors(pool: Pool) -> None:
    pool.run(on_ranks, ranks=2)


FORMS: list[tuple[str, Any]] = [
    ("dp: R, tp: S(0)", None),
    ("dp: P(sum), tp: S(1)", "tp: S(0)"),
    ("dp: S(0)", {"tp": Shard(1)}),
    ("dp: S(0), tp: S(0)", [Replicate(), Shard(1)]),
    ("tp: P(sum)", (Shard(0), Replicate())),
]


def reshards() -> None:
    for src, placements in FORMS:
        x = distribute(normal(7, 5), Layout(GRID, src))
        compiles(lambda x, placements=placements: reshard(x, placements=placements), [x])


def test_reshard_by_every_form_of_placements(pool: Pool) -> None:
    pool.run(reshards)


def elsewhere() -> str:
    torch._dynamo.reset()
    x = distribute(normal(7, 5), Layout(GRID))
    with pytest.raises(Exception) as caught:
        torch.compile(lambda x: reshard(x, mesh=ProcessMesh.grid(tp=2)), fullgraph=True, backend="aot_eager")(x)
    return str(caught.value)


def test_reshard_to_another_mesh_is_refused_with_the_remedy(pool: Pool) -> None:
    for message in pool.run(elsewhere):
        assert "compiled code reshards by placements, on the tensor's mesh; call reshard outside" in message
