"""Memory with offsets beyond 32 bits, though each stride is within: an offset cut to 32 bits is outside the memory.

Rows, columns or matrices far apart share the memory between them, which is never touched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import grouped_matmul, matmul

from .cases import assert_as_good_as_eager, expected, normal
from .test_gradients import gradients
from .test_grouped import eager, ends
from .test_tiles import WAYS

APART = 2**30 + 16  # elements; twice as many exceed 2**31, and descriptors need a multiple of 16 bytes
pytestmark = pytest.mark.usefixtures("interpreted")


def apart(x: Tensor, dim: int, step: int = APART) -> Tensor:
    """x, of size 3 at most along `dim`, with a stride of `step` there; on a CPU only touched pages take memory."""
    memory = torch.empty(2 * step + 1024, dtype=x.dtype)
    sizes = [size for i, size in enumerate(x.shape) if i != dim]
    strides = list(torch.empty(sizes, device="meta").stride())
    strides.insert(dim, step)
    found = memory.as_strided(x.shape, strides)
    found.copy_(x)
    return found


def factors(M: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    return normal(M, K, dtype=torch.bfloat16), normal(K, N, dtype=torch.bfloat16)


CASES = {
    "rows-of-a": ((3, 16, 16), "a", 0),
    "columns-of-a": ((16, 16, 3), "a", 1),
    "rows-of-b": ((16, 16, 3), "b", 0),
    "columns-of-b": ((16, 3, 16), "b", 1),
}


@pytest.mark.parametrize("way", ["descriptors", "pointers", "split-pointers"])
@pytest.mark.parametrize("case", CASES)
def test_factors(case: str, way: str) -> None:
    from weft.kernels.matmul import launch

    sizes, name, dim = CASES[case]
    a, b = factors(*sizes)
    laid = {"a": a, "b": b}
    laid[name] = apart(laid[name], dim)
    out = torch.empty(sizes[:2], dtype=torch.bfloat16)
    launch.product(laid["a"], laid["b"], None, None, None, None, out, None, configuration=WAYS[way])
    assert_as_good_as_eager(out, expected(a, b), expected(a.double(), b.double()))


@pytest.mark.parametrize("way", ["descriptors", "pointers", "in-parts", "split"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_large_offsets_of_outputs_and_of_the_residual(dim: int, way: str) -> None:
    """The output, the activation's input, and the residual."""
    from weft.kernels.matmul import launch

    a, b = factors(*((3, 16, 48) if dim == 0 else (16, 3, 48)))
    residual = normal(len(a), b.shape[1], dtype=torch.bfloat16)
    out, z = (apart(torch.zeros_like(residual), dim) for _ in range(2))
    launch.product(a, b, None, apart(residual, dim), None, None, out, z, "silu", configuration=WAYS[way])
    wide = (a.double(), b.double(), None, "silu", residual.double())
    assert_as_good_as_eager(out, expected(a, b, None, "silu", residual), expected(*wide))
    assert_as_good_as_eager(z, expected(a, b), expected(*wide[:2]))


@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors", "pointers"])
def test_products_of_a_batch(descriptors: bool) -> None:
    from weft.kernels.matmul import launch

    a, b = (normal(3, 16, 16, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    out = apart(torch.zeros_like(a), 0)
    way = WAYS["descriptors" if descriptors else "pointers"]
    launch.product(apart(a, 0), apart(b, 0), None, None, None, None, out, None, configuration=way)
    assert_as_good_as_eager(out, expected(a, b), expected(a.double(), b.double()))


def test_forward_and_backward_of_rows_apart() -> None:
    a, b = factors(3, 16, 16)
    found = gradients(lambda a, b: matmul(apart_rows(a), b, activation="relu"), a, b)
    truth = gradients(lambda a, b: expected(a, b, None, "relu"), a.double(), b.double())
    for one, other, true in zip(found, gradients(lambda a, b: expected(a, b, None, "relu"), a, b), truth, strict=True):
        assert_as_good_as_eager(one, other, true)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return apart(x, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def apart_rows(x: Tensor) -> Tensor:
    """Rows far apart, with a gradient."""
    found: Tensor = _Apart.apply(x)
    return found


SIZES, N, K, M = [1, 0, 2], 3, 16, 16


def of_groups() -> tuple[Tensor, Tensor]:
    return normal(N, K, dtype=torch.bfloat16), normal(3, K, M, dtype=torch.bfloat16)


@pytest.mark.parametrize("way", ["descriptors", "pointers"])
@pytest.mark.parametrize("what", ["rows-of-a", "groups-of-b", "rows-of-b", "columns-of-b", "rows-of-the-output"])
def test_products_of_groups(what: str, way: str) -> None:
    from weft.kernels.grouped_matmul import launch

    a, b = of_groups()
    if what == "rows-of-b":
        a, b = a[:, :3], b[:, :3]
    if what == "columns-of-b":
        b = b[..., :3]
    out = torch.zeros(N, b.shape[-1], dtype=torch.bfloat16)
    given = {"rows-of-a": (apart(a, 0), b), "groups-of-b": (a, apart(b, 0))}.get(what, (a, b))
    if what in ("rows-of-b", "columns-of-b"):
        given = a, apart(b, 1 if what == "rows-of-b" else 2)
    found = apart(out, 0) if what == "rows-of-the-output" else out
    residual = apart(torch.ones_like(out), 0) if what == "rows-of-the-output" else None
    launch.forward(*given, ends(SIZES), None, residual, None, None, found, None, configuration=WAYS[way])
    added = 0 if residual is None else 1
    assert_as_good_as_eager(found, eager(a, b, SIZES) + added, eager(a.double(), b.double(), SIZES) + added)


@pytest.mark.parametrize("way", ["descriptors", "pointers"])
@pytest.mark.parametrize("what", ["rows-of-a", "rows-of-the-gradient", "groups-of-the-output", "rows-of-the-output"])
def test_sums_over_groups(what: str, way: str) -> None:
    from weft.kernels.grouped_matmul import launch

    a, grad = normal(N, K, dtype=torch.bfloat16), normal(N, M, dtype=torch.bfloat16, seed=1)
    if what == "rows-of-the-output":
        a = a[:, :3]
    out = torch.empty(3, a.shape[1], M, dtype=torch.bfloat16)
    found = {"groups-of-the-output": lambda: apart(out, 0), "rows-of-the-output": lambda: apart(out, 1)}.get(
        what, lambda: out
    )()
    given = apart(a, 0) if what == "rows-of-a" else a, apart(grad, 0) if what == "rows-of-the-gradient" else grad
    launch.weights(*given, ends(SIZES), found, configuration=WAYS[way])
    parts = [each.split(SIZES) for each in (a, grad)]
    truth = torch.stack([rows.double().mT @ of_grad.double() for rows, of_grad in zip(*parts, strict=True)])
    assert_as_good_as_eager(found, truth.bfloat16(), truth)


def test_a_product_of_groups_and_its_gradients() -> None:
    a, b = of_groups()
    found = gradients(lambda a, b: grouped_matmul(apart_rows(a), apart_rows(b), ends(SIZES)), a, b)
    truth = gradients(lambda a, b: eager(a, b, SIZES), a.double(), b.double())
    for one, other, true in zip(found, gradients(lambda a, b: eager(a, b, SIZES), a, b), truth, strict=True):
        assert_as_good_as_eager(one, other, true)
