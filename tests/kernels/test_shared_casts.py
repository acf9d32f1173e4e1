"""`sharing_casts`: parameters are cast once for all calls inside, with the same outputs and gradients to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import linear
from weft.kernels.extension import sharing_casts
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard import distribute, to_global

from tests.support.pool import Pool

ROWS = (3, 5)


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 of tensors of two dims: the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and output.dtype == torch.bfloat16 and output.ndim == 2:
            self.count += 1
        return output


def test_each_parameter_is_cast_once() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4, requires_grad=True)
    inputs = [torch.randn(rows, 4, dtype=torch.bfloat16) for rows in ROWS]

    def step(*, shares: bool) -> tuple[list[Tensor], int]:
        weight.grad, casts = None, Casts()
        with casts, torch.autocast("cpu", dtype=torch.bfloat16):
            if shares:
                with sharing_casts():
                    outputs = [linear(each, weight) for each in inputs]
            else:
                outputs = [linear(each, weight) for each in inputs]
        for each in outputs:
            each.float().square().sum().backward()
        assert weight.grad is not None
        return [*outputs, weight.grad], casts.count

    (expected, often), (found, once) = step(shares=False), step(shares=True)
    assert (often, once) == (len(ROWS), 1)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_cast_ends_with_its_context() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with sharing_casts():
            before = linear(x, weight)
        with torch.no_grad():
            weight.mul_(3)
        with sharing_casts():
            after = linear(x, weight)
    assert torch.equal(after, 3 * before)


def on_a_mesh() -> list[bool]:
    mesh = ProcessMesh.grid(tp=2)
    torch.manual_seed(0)
    full = torch.randn(6, 4)
    weight = distribute(full, Layout(mesh, {"tp": Shard(0)}))
    weight.requires_grad_()
    inputs = [distribute(torch.randn(rows, 4).bfloat16(), Layout(mesh, {})) for rows in ROWS]

    def step(*, shares: bool) -> list[Tensor]:
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if shares:
                with sharing_casts():
                    outputs = [linear(each, weight) for each in inputs]
            else:
                outputs = [linear(each, weight) for each in inputs]
        for each in outputs:
            each.backward(torch.ones_like(each))
        assert weight.grad is not None
        return [to_global(each.detach()) for each in (*outputs, weight.grad)]

    return [torch.equal(a, b) for a, b in zip(step(shares=False), step(shares=True), strict=True)]


@pytest.mark.timeout(120)
def test_on_a_mesh(pool: Pool) -> None:
    assert pool.run(on_a_mesh, ranks=2) == [[True] * (len(ROWS) + 1)] * 2
