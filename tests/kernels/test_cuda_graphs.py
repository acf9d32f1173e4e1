"""The losses in a CUDA graph, forward and backward, replayed on other data, against the same step run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy

from tests.kernels.linear_cross_entropy.cases import make

V = 257
OPTIONS: list[Any] = [
    pytest.param({}, id="mean"),
    pytest.param({"reduction": "none", "label_smoothing": 0.1}, id="none"),
    pytest.param({"denominator": 7.0, "inplace_backward": True}, id="in-place"),
]


def of_the_logits(x: Tensor, matrix: Tensor, bias: Tensor, target: Tensor, **options: Any) -> Tensor:
    return cross_entropy(x @ matrix.T + bias, target, **options)


def of_the_product(x: Tensor, matrix: Tensor, bias: Tensor, target: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(x, matrix, target, linear_bias=bias, chunk_tokens=16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [of_the_logits, of_the_product])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_captured_step_is_replayed_on_new_data(loss, options):
    case = make((48,), V, "cuda", torch.bfloat16, bias=True)
    leaves = case.leaves()

    def step() -> tuple[Tensor, ...]:
        found = loss(*leaves, case.target, **options).sum()
        return found.detach(), *torch.autograd.grad(found, leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are compiled and workspaces made outside of the graph
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn(leaf.shape, generator=generator))
        case.target.copy_(torch.randint(V, case.target.shape, generator=generator))
    graph.replay()
    torch.testing.assert_close(captured, step())


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [of_the_logits, of_the_product])
def test_a_graphed_forward_and_backward_are_played_in_turn(loss):
    case = make((48,), V, "cuda", torch.bfloat16, bias=True)
    leaves = case.leaves()

    def whole(*factors: Tensor) -> Tensor:
        return loss(*factors, case.target)

    expected = torch.autograd.grad(whole(*leaves), leaves)
    graphed = torch.cuda.make_graphed_callables(whole, tuple(leaves))
    for factor in (0.5, 1.0, 0.25):
        gradients = torch.autograd.grad(factor * graphed(*leaves), leaves)
        torch.testing.assert_close(gradients, tuple(factor * each for each in expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["logits", "product"])
def test_a_backward_in_a_graph_of_its_own_is_played_twice(name):
    """The loss alone in the graph: torch's own products reuse the memory of what they saved, once it is read."""
    case = make((48,), V, "cuda", torch.bfloat16, bias=True)
    leaves = case.leaves()
    if name == "logits":
        x, matrix, bias = leaves
        leaves = [(x @ matrix.T + bias).detach().requires_grad_()]

    def loss(*factors: Tensor) -> Tensor:
        return cross_entropy(*factors, case.target) if name == "logits" else of_the_product(*factors, case.target)

    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.cuda.make_graphed_callables(loss, tuple(leaves))(*leaves)
    for factor in (0.5, 1.0, 0.25):
        gradients = torch.autograd.grad(factor * found, leaves, retain_graph=True)
        torch.testing.assert_close(gradients, tuple(factor * each for each in expected))
