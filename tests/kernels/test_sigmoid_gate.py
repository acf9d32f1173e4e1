"""`sigmoid_gate`: x times the sigmoid of a number for each row; values, gradients, layouts and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels import sigmoid_gate
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import distribute, to_global

from tests.support.pool import Pool


def operands(*lead: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*lead, 5, generator=generator), torch.randn(*lead, 1, generator=generator)


def both(x: Tensor, score: Tensor) -> list[Tensor]:
    """The output, and both gradients."""
    x, score = x.detach().clone().requires_grad_(), score.detach().clone().requires_grad_()
    output = sigmoid_gate(x, score)
    output.backward(torch.ones_like(output) * 0.5)
    assert x.grad is not None and score.grad is not None
    return [output.detach(), x.grad, score.grad]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 3)], ids=str)
def test_values_and_gradients(lead: tuple[int, ...]) -> None:
    x, score = (each.double().requires_grad_() for each in operands(*lead))
    torch.testing.assert_close(sigmoid_gate(x, score), x * torch.sigmoid(score))
    assert torch.autograd.gradcheck(sigmoid_gate, (x, score))


def on_ranks() -> list[Tensor]:
    layout = Layout(ProcessMesh.grid(dp=2, tp=2), "dp: S(0), tp: S(1)")
    with pytest.raises(LayoutError):
        sigmoid_gate(*(distribute(each, Layout(layout.mesh, "tp: P")) for each in operands(2, 3)))
    with pytest.raises(LayoutError):
        x, score = operands(2, 3)
        sigmoid_gate(distribute(x, layout), distribute(score, Layout(layout.mesh, "dp: S(0)")))
    return [to_global(each) for each in both(*(distribute(each, layout) for each in operands(2, 3)))]


def test_shards_of_tokens(pool: Pool) -> None:
    for found in pool.run(on_ranks, ranks=4):
        for each, wanted in zip(found, both(*operands(2, 3)), strict=True):
            torch.testing.assert_close(each, wanted)


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"score \[..., 1\] for each row, got \(2, 5\) and \(2, 5\); .* \(2, 1\)"):
        sigmoid_gate(torch.ones(2, 5), torch.ones(2, 5))
