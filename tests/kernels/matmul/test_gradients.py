"""Gradients of matmul and linear: torch's path by finite differences, kernels against float64; and saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import linear, matmul
from weft.kernels.launching.traffic import counted_traffic

from .cases import ACTIVATIONS, assert_as_good_as_eager, expected, normal


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", ["rows", "batched", "residual-row"])
def test_gradients_by_finite_differences(kind: str, activation: str | None) -> None:
    shapes = {
        "rows": ((2, 3, 4), (4, 5), (5,), (2, 3, 5)),
        "batched": ((2, 3, 4), (2, 4, 5), (5,), (2, 3, 5)),
        "residual-row": ((3, 4), (4, 5), (5,), (1, 5)),
    }[kind]
    tensors = [normal(*shape).requires_grad_() for shape in shapes]

    def run(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return matmul(a, b, bias=bias, activation=activation, residual=residual, alpha=0.5, beta=2.0)

    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_of_linear_by_finite_differences(activation: str | None) -> None:
    tensors = [normal(*shape).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(lambda *t: linear(*t, activation=activation), tensors)


ALONE = [each for each in ACTIVATIONS if each is not None]


@pytest.mark.parametrize("activation", ALONE)
def test_gradients_through_an_activation_of_the_input_by_finite_differences(activation: str) -> None:
    tensors = [normal(*shape).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(lambda *t: linear(*t, activation="silu", input_activation=activation), tensors)


@pytest.mark.parametrize("activation", ALONE)
def test_an_activation_of_the_input_in_16_bits_is_as_good_as_eagers(activation: str, device: str) -> None:
    tensors = [normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((20, 32), (24, 32), (24,))]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight, bias, input_activation=activation)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return expected(expected(x, torch.eye(32, dtype=x.dtype, device=x.device), None, activation), weight.mT, bias)

    wide = [each.double() for each in tensors]
    assert_as_good_as_eager(run(*tensors), eager(*tensors), eager(*wide))
    for one, other, true in zip(
        gradients(run, *tensors), gradients(eager, *tensors), gradients(eager, *wide), strict=True
    ):
        assert_as_good_as_eager(one, other, true)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_derivative_is_computed_in_the_epilogue(activation: str, interpreted: None) -> None:
    """Tiles of 16 x 32 of the input's gradient read the factors' panels, and the activation's input once."""
    N, M, K = 48, 32, 64
    x, weight = (normal(*shape, dtype=torch.float16).requires_grad_() for shape in ((N, K), (M, K)))
    weight.requires_grad_(False)
    output = linear(x, weight, input_activation=activation)
    with counted_traffic() as traffic:
        torch.autograd.grad(output, x, torch.ones_like(output))
    assert traffic.loaded == 2 * (N * M * (K // 32) + M * K * (N // 16) + N * K)
    assert traffic.stored == 2 * N * K
    assert kept(lambda *t: linear(*t, input_activation=activation), x, weight) == 0


def gradients(run: Any, *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = run(*leaves)
    upstream = normal(*output.shape, seed=3).to(output)
    return list(torch.autograd.grad(output, leaves, upstream))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu", "relu2"])
def test_gradients_in_16_bits_are_as_good_as_eagers(activation: str, device: str) -> None:
    tensors = [normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((20, 32), (24, 32), (24,))]

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return expected(x, weight.mT, bias, activation)

    found = gradients(lambda *t: linear(*t, activation=activation), *tensors)
    truth = gradients(eager, *(each.double() for each in tensors))
    for one, other, true in zip(found, gradients(eager, *tensors), truth, strict=True):
        assert_as_good_as_eager(one, other, true)


def kept(run: Any, *tensors: Tensor) -> int:
    """Elements saved for backward outside the operands' memory."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run(*tensors)
    for known in (*tensors, output):  # the next op keeps the output anyway
        found.pop(known.data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize(
    ("activation", "outputs"),
    [(None, 0), ("relu", 0), ("gelu", 1), ("silu", 1), ("relu2", 1)],
    ids=["none", "relu", "gelu", "silu", "relu2"],
)
def test_the_input_of_the_activation_is_kept(activation: str | None, outputs: int, device: str) -> None:
    x, weight = (normal(*shape, dtype=torch.float32).to(device).requires_grad_() for shape in ((6, 8), (10, 8)))
    assert kept(lambda *t: linear(*t, activation=activation), x, weight) == outputs * 60


def test_one_run_and_the_next_are_bitwise_equal(device: str) -> None:
    tensors = [normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((20, 40), (24, 40), (24,))]
    first, second = (gradients(lambda *t: linear(*t, activation="gelu"), *tensors) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_an_operand_that_needs_no_gradient_has_none() -> None:
    a, b = normal(3, 4), normal(4, 5).requires_grad_()
    matmul(a, b, activation="silu").sum().backward()
    assert a.grad is None and b.grad is not None
