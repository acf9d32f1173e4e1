"""With ZeRO 3 gathers run between the sums of gradients, in one order on all ranks; else `wait()` says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, distribute
from weft.reshard.extension import ParameterSlot, gather_when_called
from weft.reshard.moving.dtensor import wrap

BLOCKS, SIZE = 12, 64


class Scale(torch.autograd.Function):
    """x, with the gradient 100 for the weight, or none where the weight is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, is_used: bool) -> Tensor:
        ctx.weight, ctx.is_used = weight, is_used
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Any, None]:
        mesh = ProcessMesh.grid(dp=2)
        part = torch.full((SIZE,), 100.0 * (dist.get_rank() + 1))
        return grad, wrap(part, Layout(mesh, "dp: P"), (SIZE,)) if ctx.is_used else None, None


class Block(nn.Module):
    def __init__(self, mesh: ProcessMesh, number: int) -> None:
        super().__init__()
        self.number = number
        self.w = nn.Parameter(distribute(torch.zeros(SIZE), Layout(mesh, "dp: S(0)")))

    def forward(self, x: Tensor, missing: int | None) -> Tensor:
        return Scale.apply(x, self.w, self.number != missing)  # type: ignore[no-any-return,no-untyped-call]


class Stack(nn.Module):
    def __init__(self, mesh: ProcessMesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(mesh, number) for number in range(BLOCKS)])
        slots = {
            block: [
                ParameterSlot(
                    module=block, name="w", layout=Layout(mesh), keep_between_calls=False, accumulate_grad=False
                )
            ]
            for block in self.blocks
        }
        gather_when_called(self, slots, keep_for_backward=lambda _: False)

    def forward(self, x: Tensor, missing: int | None) -> Tensor:
        for block in self.blocks:
            x = block(x, missing)
        return x


def steps(missing: int | None, on_both: bool, since: int = 1) -> tuple[str, bool]:
    """The error of a step, or ""; and whether the sums of all steps are right.

    missing: the block without a gradient, on rank 1 or on both, from step `since`.
    """
    model = Stack(ProcessMesh.grid(dp=2))
    sync = GradientSync(model, bucket_bytes=1)
    right = True
    for number in range(3):
        lacks = missing if number >= since and (on_both or dist.get_rank() == 1) else None
        model(torch.zeros(3, requires_grad=True), lacks).sum().backward()
        try:
            sync.wait()
        except RuntimeError as error:
            return str(error), right
        for block in model.blocks:
            grad = block.w.grad
            expected = 300.0 if number < since or block.number != missing else (None if on_both else 100.0)
            if expected is None:
                right = right and grad is None
            else:
                right = right and torch.equal(grad.to_local(), torch.full((SIZE // 2,), expected))
        model.zero_grad()
    return "", right


@pytest.mark.few(1)
@pytest.mark.parametrize("missing", range(BLOCKS))
def test_zeros_are_sent_before_the_next_gather(missing: int, pool: Any) -> None:
    assert pool.run(steps, missing, False, ranks=2) == [("", True)] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("missing", [3, 5, 6, 7, 9, 10, 11])
def test_sums_that_met_gathers_are_refused(missing: int, pool: Any) -> None:
    """In the first step no rank knows the layout of a gradient that does not come."""
    for error, _ in pool.run(steps, missing, False, 0, ranks=2):
        assert "parameters were gathered between the sums of gradients (ZeRO 3)" in error


@pytest.mark.few(1)
@pytest.mark.parametrize(("missing", "on_both"), [(None, False), (0, False), (4, True)])
def test_sums_in_the_same_order_are_right(missing: int | None, on_both: bool, pool: Any) -> None:
    for error, right in pool.run(steps, missing, on_both, ranks=2):
        assert not error and right
