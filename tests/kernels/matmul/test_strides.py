"""Factors copied before a product: only those whose rows cannot be described by a single stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import linear, matmul

from .cases import assert_as_good_as_eager, expected, normal

COPIES = {"aten::clone", "aten::copy_", "aten::_to_copy", "aten::repeat"}


class Copies(TorchDispatchMode):
    """Counts the copies made inside this mode of as many elements as the operands have."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().partition(".")[0] in COPIES
        return func(*args, **(kwargs or {}))


def made(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, dtype=torch.float32, seed=seed)


def transposed(*shape: int, seed: int = 0) -> Tensor:
    return made(*shape[:-2], shape[-1], shape[-2], seed=seed).mT


def rows_apart(*shape: int) -> Tensor:
    return made(*shape[:-1], shape[-1] + 3)[..., :-3]


FACTORS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], int]] = {
    "2-d": (lambda: (made(5, 6), made(6, 7)), 0),
    "2-d-a-transposed": (lambda: (transposed(5, 6), made(6, 7)), 0),
    "2-d-b-transposed": (lambda: (made(5, 6), transposed(6, 7)), 0),
    "2-d-both-transposed": (lambda: (transposed(5, 6), transposed(6, 7)), 0),
    "2-d-elements-apart": (lambda: (made(5, 12)[:, ::2], made(12, 7)[::2]), 0),
    "3-d": (lambda: (made(2, 5, 6), transposed(6, 7)), 0),
    "3-d-rows-apart": (lambda: (rows_apart(2, 5, 6), made(6, 7)), 0),
    "batches": (lambda: (made(2, 5, 6), made(2, 6, 7)), 0),
    "batches-both-transposed": (lambda: (transposed(2, 5, 6), transposed(2, 6, 7)), 0),
    "4-d-batches": (lambda: (made(2, 3, 5, 6), transposed(2, 3, 6, 7)), 0),
    # The docstring's exceptions: no single stride describes a's rows, or the batches.
    "3-d-a-transposed": (lambda: (transposed(2, 5, 6), made(6, 7)), 1),
    "4-d-heads": (lambda: (made(2, 5, 3, 6).transpose(1, 2), made(2, 3, 6, 7)), 1),
}


@pytest.mark.parametrize("case", FACTORS)
def test_factors(case: str, interpreted: None) -> None:
    make, copied = FACTORS[case]
    a, b = make()
    with Copies() as copies, torch.no_grad():
        found = matmul(a, b, activation="silu")
    assert copies.count == copied
    assert_as_good_as_eager(found, expected(a, b, None, "silu"), expected(a.double(), b.double(), None, "silu"))


RESIDUALS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "whole": (lambda: made(2, 5, 7), 0),
    "rows-apart": (lambda: rows_apart(2, 5, 7), 0),
    "row": (lambda: made(7), 0),
    "number": (lambda: made(1, 1, 1), 0),
    "columns-apart": (lambda: made(2, 5, 14)[..., ::2], 0),
    "without-leading-dims": (lambda: made(5, 7), 1),
}


@pytest.mark.parametrize("case", RESIDUALS)
def test_residuals(case: str, interpreted: None) -> None:
    make, copied = RESIDUALS[case]
    a, b, residual = made(2, 5, 6), made(6, 7), make()
    with Copies() as copies, torch.no_grad():
        found = matmul(a, b, residual=residual)
    assert copies.count == copied
    wide = expected(a.double(), b.double(), None, None, residual.double())
    assert_as_good_as_eager(found, expected(a, b, None, None, residual), wide)


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        pytest.param(lambda: rows_apart(2, 5, 6), 0, id="rows-apart"),
        pytest.param(lambda: transposed(5, 6), 0, id="2-d-transposed"),
        pytest.param(lambda: transposed(2, 5, 6), 1, id="3-d-transposed"),
    ],
)
def test_inputs_of_linear(make: Callable[[], Tensor], copied: int, interpreted: None) -> None:
    input, weight = make(), transposed(7, 6)
    with Copies() as copies, torch.no_grad():
        found = linear(input, weight, activation="silu")
    assert copies.count == copied
    wide = expected(input.double(), weight.mT.double(), None, "silu")
    assert_as_good_as_eager(found, expected(input, weight.mT, None, "silu"), wide)


@pytest.mark.parametrize("way", ["2-d", "batches"])
def test_gradients_of_transposed_factors_copy_nothing(way: str, interpreted: None) -> None:
    shapes = ((5, 6), (6, 7)) if way == "2-d" else ((2, 5, 6), (2, 6, 7))
    a, b = (transposed(*shape).requires_grad_() for shape in shapes)
    out = matmul(a, b, activation="silu")
    upstream = torch.ones_like(out)
    with Copies() as copies:
        torch.autograd.grad(out, (a, b), upstream)
    assert copies.count == 0
