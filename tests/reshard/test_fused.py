"""Fused optimizer steps on DTensors equal the whole tensors' steps, on each rank's parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import distribute, to_global

from tests.support.pool import Pool

SHAPES = ((6, 4), (5,), ())
LAYOUTS = ("S(0)", "S(0)", "R")
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.02)}),
]


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def steps(laid_out: bool) -> list[list[Tensor]]:
    """The parameters after two steps of each optimizer, whole."""
    mesh = ProcessMesh.grid(dp=2)

    def lying(tensors: list[Tensor]) -> list[Tensor]:
        pairs = zip(tensors, LAYOUTS, strict=True)
        return [distribute(each, Layout(mesh, f"dp: {how}")) if laid_out else each for each, how in pairs]

    found = []
    for kind, options in OPTIMIZERS:
        parameters = [torch.nn.Parameter(each) for each in lying(values(0))]
        optimizer = kind(parameters, fused=True, **options)
        for seed in (1, 2):
            for parameter, gradient in zip(parameters, lying(values(seed)), strict=True):
                parameter.grad = gradient
            optimizer.step()
        found.append([to_global(each.detach()) if laid_out else each.detach() for each in parameters])
    return found


def test_parts_are_updated_as_the_whole(pool: Pool) -> None:
    truth = steps(False)
    for rank in pool.run(steps, True, ranks=2):
        for one, other in zip(rank, truth, strict=True):
            for laid_out, whole in zip(one, other, strict=True):
                torch.testing.assert_close(laid_out, whole, rtol=0, atol=0)


def other_layouts() -> tuple[Tensor, str]:
    """A parameter after a step with a Partial gradient, and the error for a state in a different layout."""
    mesh = ProcessMesh.grid(dp=2)
    parameter = torch.nn.Parameter(distribute(torch.ones(3), Layout(mesh, "dp: R")))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = distribute(torch.arange(3.0), Layout(mesh, "dp: P(sum)"))
    optimizer.step()
    found = parameter.to_local().detach().clone()
    optimizer.state[parameter]["exp_avg"] = distribute(torch.zeros(3), Layout(mesh, "dp: S(0)"))
    with pytest.raises(LayoutError) as refused:
        optimizer.step()
    return found, str(refused.value)


def test_a_gradient_that_lies_otherwise_is_brought_as_torch_does_and_a_state_is_refused(pool: Pool) -> None:
    whole = torch.nn.Parameter(torch.ones(3))
    whole.grad = torch.arange(3.0)
    torch.optim.AdamW([whole], fused=True).step()
    for found, said in pool.run(other_layouts, ranks=2):
        torch.testing.assert_close(found, whole.detach(), rtol=0, atol=0)
        assert "an optimizer state of a parameter of shape (3,) is (dp: S(0)), and the parameter is (dp: R)" in said
