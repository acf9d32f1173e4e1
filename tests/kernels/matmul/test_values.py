"""matmul and linear, by plain torch and by interpreted kernels, against float64: as exact as eager torch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import linear, matmul

from .cases import ACTIVATIONS, assert_as_good_as_eager, expected, normal

SHAPES = [(20, 33, 40), (1, 1, 1), (7, 5, 3), (0, 3, 4), (4, 0, 3), (5, 7, 0), (64, 16, 32)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES, ids=str)
def test_a_product_and_what_follows_it(
    M: int, N: int, K: int, dtype: torch.dtype, activation: str | None, device: str
) -> None:
    a, b, bias, residual = (normal(*shape, dtype=dtype).to(device) for shape in ((M, K), (K, N), (N,), (M, N)))
    found = matmul(a, b, bias=bias, activation=activation, residual=residual, alpha=0.5, beta=0.25)
    truth = expected(a.double(), b.double(), bias.double(), activation, residual.double(), 0.5, 0.25)
    assert found.dtype == dtype
    assert_as_good_as_eager(found, expected(a, b, bias, activation, residual, 0.5, 0.25), truth)


@pytest.mark.parametrize("b_transposed", [False, True], ids=["b", "b.T"])
@pytest.mark.parametrize("a_transposed", [False, True], ids=["a", "a.T"])
def test_no_factor_is_copied_to_be_transposed(a_transposed: bool, b_transposed: bool, device: str) -> None:
    M, N, K = 24, 40, 32
    a = normal(K, M, dtype=torch.bfloat16).mT if a_transposed else normal(M, K, dtype=torch.bfloat16)
    b = normal(N, K, dtype=torch.bfloat16).mT if b_transposed else normal(K, N, dtype=torch.bfloat16)
    a, b = a.to(device), b.to(device)
    grad = normal(M, N, dtype=torch.bfloat16).to(device)
    a.requires_grad_(), b.requires_grad_()
    with Multiplied() as multiplied:
        found = matmul(a, b, activation="relu")
        torch.autograd.grad(found, (a, b), grad)
    found, a, b = found.detach(), a.detach(), b.detach()
    assert_as_good_as_eager(found, expected(a, b, None, "relu"), expected(a.double(), b.double(), None, "relu"))
    dz = multiplied.factors[1][0]  # in memory of its own, made in forward
    assert multiplied.factors == [
        (lies(a), lies(b)),
        (dz, lies(b.mT)),
        (lies(a.mT), dz),
    ]
    assert not multiplied.copies


def lies(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Where, and with which strides."""
    return x.data_ptr(), x.stride()


class Multiplied(TorchDispatchMode):
    """Records the factors of products, torch's and the kernel's, and the ops that copied a tensor."""

    PRODUCTS: ClassVar = {"mm": 0, "addmm": 1, "matmul": 0}  # where the factors are; the last is the kernel's launch
    COPIES: ClassVar = ("clone", "copy_", "_to_copy", "contiguous", "cat", "new_empty_strided")

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[Any, Any]] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self.PRODUCTS:
            a, b = args[self.PRODUCTS[name] :][:2]
            self.factors.append((lies(a), lies(b)))
        if name in self.COPIES:
            self.copies.append(name)
        return func(*args, **(kwargs or {}))


def strided(kind: str, device: str) -> tuple[Tensor, Tensor]:
    wide = normal(40, 80, dtype=torch.bfloat16).to(device)
    return {
        "padded": lambda: (wide[:, :32], wide[:32, 3:20]),
        "every-other": lambda: (wide[::2, ::2], wide[:, 1:7]),
        "expanded": lambda: (wide[:1].expand(17, 80), wide.mT[:, :9]),
        "not-aligned": lambda: (wide[:, 1:33], wide[1:33, 1:33]),
    }[kind]()


@pytest.mark.parametrize("kind", ["padded", "every-other", "expanded", "not-aligned"])
def test_any_strides(kind: str, device: str) -> None:
    a, b = strided(kind, device)
    found = matmul(a, b, alpha=2.0)
    assert_as_good_as_eager(found, expected(a, b, alpha=2.0), expected(a.double(), b.double(), alpha=2.0))


@pytest.mark.parametrize(
    "residual",
    [(2, 3, 5, 6), (6,), (5, 6), (3, 1, 6), (2, 1, 1, 1)],
    ids=["whole", "row", "matrix", "broadcast-rows", "numbers"],
)
@pytest.mark.parametrize("batched", [False, True], ids=["one-b", "a-b-each"])
def test_leading_dims_and_residuals_that_broadcast(batched: bool, residual: tuple[int, ...], device: str) -> None:
    a = normal(2, 3, 5, 4, dtype=torch.float32).to(device)
    b = normal(*((2, 3) if batched else ()), 4, 6, dtype=torch.float32).to(device)
    bias, added = normal(6, dtype=torch.float32).to(device), normal(*residual, dtype=torch.float32).to(device)
    given = (bias, "silu", added)
    found = matmul(a, b, bias=bias, activation="silu", residual=added)
    truth = expected(a.double(), b.double(), bias.double(), "silu", added.double())
    assert_as_good_as_eager(found, expected(a, b, *given), truth)


def test_sums_are_of_float32_and_rounded_once(device: str) -> None:
    a, b = normal(8, 64, dtype=torch.bfloat16).to(device), normal(64, 8, dtype=torch.bfloat16).to(device)
    wide = matmul(a, b, out_dtype=torch.float32, activation="relu")
    assert wide.dtype == torch.float32
    truth = expected(a.double(), b.double(), None, "relu")
    assert_as_good_as_eager(wide, expected(a.float(), b.float(), None, "relu"), truth)


@pytest.mark.parametrize("scales", ["numbers", "rows", "none"])
@pytest.mark.parametrize("dtypes", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")], ids="-".join)
def test_eight_bits_with_scales(dtypes: tuple[str, str], scales: str, device: str) -> None:
    a, b = (
        normal(*shape).to(getattr(torch, f"float8_{name}"))
        for name, shape in zip(dtypes, ((20, 48), (48, 24)), strict=True)
    )
    shapes = {"numbers": ((), ()), "rows": ((20,), (24,))}.get(scales)
    given = (
        [None, None] if shapes is None else [normal(*shape, dtype=torch.float32, seed=1).to(device) for shape in shapes]
    )
    found = matmul(a.to(device), b.to(device), a_scale=given[0], b_scale=given[1])
    left, right = (1.0 if each is None else each.double().cpu() for each in given)
    left = left[:, None] if scales == "rows" else left
    truth = a.double() @ b.double() * left * right
    assert found.dtype == torch.bfloat16
    assert_as_good_as_eager(found.cpu(), truth.bfloat16(), truth)


def test_weight_gradients_add_up_in_float32_over_microbatches(device: str) -> None:
    total = torch.zeros(8, 6, device=device)
    truth = torch.zeros(8, 6, dtype=torch.float64)
    for microbatch in range(4):
        grad, x = (normal(16, size, dtype=torch.bfloat16, seed=microbatch).to(device) for size in (8, 6))
        assert matmul(grad.mT, x, accumulate_into=total) is total
        truth += grad.double().cpu().mT @ x.double().cpu()
    assert_as_good_as_eager(total.cpu(), truth.float(), truth)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_linear_is_torchs_and_the_activation(activation: str | None, device: str) -> None:
    x, weight, bias = (normal(*shape, dtype=torch.bfloat16).to(device) for shape in ((2, 9, 24), (40, 24), (40,)))
    found = linear(x, weight, bias, activation=activation)
    truth = expected(x.double(), weight.double().mT, bias.double(), activation)
    assert_as_good_as_eager(found, expected(x, weight.mT, bias, activation), truth)


def test_relu_keeps_what_is_no_number(device: str) -> None:
    a = torch.tensor([[float("nan"), 1.0], [0.0, -1.0]], device=device)
    found = matmul(a, torch.eye(2, device=device), activation="relu")
    torch.testing.assert_close(found.cpu(), torch.tensor([[float("nan")] * 2, [0.0, 0.0]]), equal_nan=True)
