"""Layers side by side in a plan: siblings with two inputs, plain tensors, and a module with two names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weft.kernels import add
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.models import ColwiseParallel, ParallelPlan, RowwiseParallel, parallelize
from weft.models.layers import Linear
from weft.reshard import distribute

from tests.models.cases import whole
from tests.support.collectives import Collectives


class Crossed(nn.Module):
    """Column-parallel siblings that are given two tensors, as in cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Linear(8, 12, bias=True), Linear(8, 12, bias=True)
        self.out = Linear(12, 8, bias=True)
        for index, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(add(self.left(x), self.right(y)))


CROSSED = ParallelPlan(tensor={"left": ColwiseParallel(), "right": ColwiseParallel(), "out": RowwiseParallel()})


def crossed(recompute: bool) -> list[Tensor]:
    mesh = ProcessMesh.grid(tp=2)
    model = parallelize(Crossed(), mesh, CROSSED)
    inputs = [distribute(part, Layout(mesh)).requires_grad_() for part in two_inputs()]
    y = checkpoint(model, *inputs, use_reentrant=False) if recompute else model(*inputs)
    y.backward(distribute(torch.ones(3, 8), Layout(mesh)))
    return [whole(y), *(whole(x.grad) for x in inputs), *(whole(p.grad) for p in model.parameters())]


def two_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("recompute", [False, True])
def test_siblings_that_are_given_two_tensors(recompute: bool, pool) -> None:
    model, inputs = Crossed(), [part.requires_grad_() for part in two_inputs()]
    y = model(*inputs)
    y.backward(torch.ones(3, 8))
    expected = [y.detach(), *(x.grad for x in inputs), *(p.grad for p in model.parameters())]
    for found in pool.run(crossed, recompute, ranks=2):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def plain_input() -> None:
    """A plain tensor is taken as replicated; if it needs a gradient, which would be Partial, it is refused."""
    inputs, expected = two_inputs(), Crossed()(*two_inputs())
    model = parallelize(Crossed(), ProcessMesh.grid(tp=2), CROSSED)
    torch.testing.assert_close(whole(model(*inputs)), expected)
    output = model(*(part.requires_grad_() for part in inputs))
    with pytest.raises(LayoutError, match=r"make the tensor a DTensor with distribute\(\)"):
        output.backward(distribute(torch.ones(3, 8), Layout(ProcessMesh.grid(tp=2))))


def test_a_plain_input_of_column_parallel_layers(pool) -> None:
    pool.run(plain_input, ranks=2)


class Shared(Crossed):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.left


def shared() -> list[Tensor]:
    mesh = ProcessMesh.grid(tp=2)
    plan = ParallelPlan(tensor={"left": ColwiseParallel(), "out": RowwiseParallel()})
    model = parallelize(Shared(), mesh, plan)
    x, _ = (distribute(part, Layout(mesh)).requires_grad_() for part in two_inputs())
    with Collectives() as seen:
        y = model(x, x)
        y.backward(distribute(torch.ones(3, 8), Layout(mesh)))
    assert seen.kinds == ["all-reduce"] * 2
    return [whole(y), whole(x.grad), *(whole(p.grad) for p in model.parameters())]


def test_a_module_under_two_names_is_laid_out_once(pool) -> None:
    model, (x, _) = Shared(), two_inputs()
    y = model(x.requires_grad_(), x)
    y.backward(torch.ones(3, 8))
    expected = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    for found in pool.run(shared, ranks=2):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
