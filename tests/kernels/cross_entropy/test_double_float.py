"""Numbers of two float32, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

on_kernels = pytest.mark.parametrize(
    "device", ["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def computed(name: str, a: Tensor, b: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """The two numbers that a function gives for each of a and b."""
    from tests.kernels import double_float_kernels

    high, low = (torch.empty(len(a), device=device) for _ in range(2))
    getattr(double_float_kernels, name)[(1,)](a.to(device), b.to(device), high, low, N=len(a))
    return high.cpu(), low.cpu()


def normal(N: int, size: float, seed: int) -> Tensor:
    return size * torch.randn(N, generator=torch.Generator().manual_seed(seed))


@on_kernels
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_two_sum_is_exact(device: str, size: float) -> None:
    a, b = normal(4096, 1, 0), normal(4096, size, 1)
    high, low = computed("two_sum", a, b, device)
    assert torch.equal(high, a + b)
    assert torch.equal(high.double() + low.double(), a.double() + b.double())


@on_kernels
@pytest.mark.parametrize("largest", [1e-3, 1.0, 80.0])
def test_exp_has_26_bits(device: str, largest: float) -> None:
    high = -largest * torch.rand(1 << 14, generator=torch.Generator().manual_seed(2))
    low = normal(1 << 14, 2**-26, 3) * high.abs()
    first, rest = computed("exp", high, low, device)
    truth = (high.double() + low.double()).exp()
    assert ((first.double() + rest.double() - truth).abs() <= 2**-26 * truth).all()


@on_kernels
def test_exp_at_the_edges(device: str) -> None:
    high = torch.tensor([0.0, -110.0, -104.0, 88.0, -87.0, 1e-9, -1e-9, torch.nan])
    found = sum(computed("exp", high, torch.zeros(8), device))
    assert found[:2].tolist() == [1, 0]
    torch.testing.assert_close(found[2:7], high[2:7].exp(), rtol=1e-6, atol=0)
    assert found[7].isnan()
