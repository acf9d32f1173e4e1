"""`Sum24`: rounding to 16 significant bits, errors no larger than of a float32 sum, and memory traffic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels.linear_cross_entropy import gradients
from weft.kernels.linear_cross_entropy.chunks import LogitFactors
from weft.kernels.linear_cross_entropy.gradients import ADDITIONS, ProductGradients, Sum24, accumulate

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1 + 2**-16,
    1 + 3 * 2**-16,
    2**-149,
    -(2**-130),
    3.4e38,
    torch.inf,
    -torch.inf,
    torch.nan,
]


def numbers(device: str) -> Tensor:
    """Float32 numbers of any bits, and special values."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (5000,), generator=generator).int()
    return torch.cat([bits.view(torch.float32), torch.tensor(SPECIAL)]).to(device)


def empty(like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(like, dtype=torch.bfloat16), torch.empty_like(like, dtype=torch.uint8)


def value(high: Tensor, low: Tensor) -> Tensor:
    """The sum in float64, from the bits of sign, exponent and 15 of the fraction. A CPU has exact powers of two."""
    bits = (high.cpu().view(torch.int16).long() & 0xFFFF) << 8 | low.cpu().long()
    exponent, fraction = bits >> 15 & 0xFF, (bits & 0x7FFF).double() * 2**-15
    found = torch.where(exponent > 0, (1 + fraction) * 2 ** (exponent - 127).double(), fraction * 2.0**-126)
    found = torch.where(exponent == 255, torch.where(fraction > 0, torch.nan, torch.inf), found)
    return torch.where(bits >> 23 > 0, -found, found)


def rounded(x: Tensor) -> Tensor:
    """x on the CPU, rounded to 16 significant bits, ties to even, by float64's arithmetic.

    The spacing is at least 256 times float32's smallest.
    """
    x = x.cpu().double()
    _, exponent = torch.frexp(x)
    spacing = 2 ** (exponent - 16).clamp(min=-141).double()
    found = torch.round(x / spacing) * spacing
    return torch.where(found.abs() >= 2.0**128, x.sign() * torch.inf, found)


def test_a_float32_is_rounded_to_the_nearest_16_significant_bits(device):
    x = numbers("cpu")
    high, low = empty(x.to(device))
    accumulate(x.to(device, copy=True), high, low, True, False)
    finite = x.isfinite()
    assert finite.sum() > 4000
    assert torch.equal(value(high, low)[finite], rounded(x)[finite])
    assert torch.equal(value(high, low)[~finite].nan_to_num(), x[~finite].double().nan_to_num())
    assert torch.equal(value(high, low).isnan(), x.isnan())


def test_a_nan_of_any_bits_stays_nan(device):
    """Includes the NaN of a GPU, whose bits are all ones: rounded like a number, this NaN would become -0."""
    x = torch.tensor([0x7FFFFFFF, 0x7FFFFF80, 0x7F800001, -1], dtype=torch.int32).view(torch.float32).to(device)
    high, low = empty(x)
    accumulate(x, high, low, True, False)
    assert value(high, low).isnan().all()


def test_a_sum_and_a_product_are_added_in_float32(device):
    generator = torch.Generator().manual_seed(1)
    x, y, z = (torch.randn(7001, generator=generator) for _ in range(3))
    high, low = empty(x.to(device))
    accumulate(x.to(device, copy=True), high, low, True, False)
    accumulate(y.to(device, copy=True), high, low, False, False)
    total = (rounded(x).float() + y).double()
    assert torch.equal(value(high, low), rounded(total.float()))
    before = low.clone()
    accumulate(z.to(device, copy=True), high, low, False, True)
    assert torch.equal(high.cpu(), (rounded(total.float()).float() + z).bfloat16())
    assert torch.equal(low, before)


def factors(n: int, V: int, H: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(n, V, generator=generator) * 0.01, torch.randn(n, H, generator=generator).abs()
    return a.bfloat16().to(device), b.bfloat16().to(device)


@pytest.mark.parametrize("chunks", [2, ADDITIONS, ADDITIONS + 1, 8 * ADDITIONS])
def test_many_addends_below_the_spacing_lose_little(device, chunks):
    """24 bits alone would lose each addend, which is below half the spacing at 1; float32 sums of several do not."""
    small = torch.tensor(0.9 * 2**-16).bfloat16()
    x = torch.full((chunks, 1), float(small), dtype=torch.bfloat16, device=device)
    x[0] = 1
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    rows = [slice(i, i + 1) for i in range(chunks)]
    sums = ProductGradients(
        LogitFactors(x, weight, None, torch.zeros(chunks, dtype=torch.int64)), (None, torch.bfloat16, None), rows
    )
    for some in rows:
        sums.add(some, torch.ones(1, 1, dtype=torch.bfloat16, device=device))
    (found,), truth = sums.dweight.double(), float(x.double().sum())
    few = chunks <= ADDITIONS
    assert sums.dweight.dtype == (torch.bfloat16 if few else torch.float32)
    assert abs(found - truth) <= (2**-8 / 4 if few else 1e-5) * truth


@pytest.mark.parametrize("additions", [2, 64])
def test_the_error_is_that_of_a_sum_in_float32(device, additions):
    a, b = factors(2048, 24, 16, device)
    truth = a.double().T @ b.double()
    exact = torch.zeros(24, 16, device=device)
    total = Sum24(exact, additions)
    for part, other in zip(a.chunk(additions), b.chunk(additions), strict=True):
        total.add(part, other)
        exact += part.float().T @ other.float()
    ours, float32 = (float((each.double() - truth).square().mean().sqrt()) for each in (total.total, exact.bfloat16()))
    assert ours <= 1.05 * float32
    assert total.total.dtype == torch.bfloat16


@pytest.mark.parametrize(("V", "H"), [(300, 16), (0, 16), (5, 0), (3, 300)])
def test_a_product_in_blocks_is_the_whole(device, V, H, monkeypatch):
    a, b = factors(64, V, H, device)
    like = torch.empty(V, H, device=device)
    whole = Sum24(like, 2)
    monkeypatch.setattr(gradients, "PRODUCT_BYTES", 4 * 128 * 16)
    monkeypatch.setattr(gradients, "PRODUCT_BYTES_ON_CPU", 4 * 128 * 16)
    blocks = Sum24(like, 2)
    for total in (whole, blocks):
        for rows in (slice(0, 40), slice(40, 64)):
            total.add(a[rows], b[rows])
    torch.testing.assert_close(blocks.total, whole.total, rtol=2**-7, atol=0)
    torch.testing.assert_close(whole.total.double(), a.double().T @ b.double(), rtol=2**-7, atol=1e-4)


def test_an_addition_reads_and_writes_3_bytes_an_element_beside_the_product(interpreted):
    from weft.kernels.launching.traffic import Traffic, counted_traffic

    x = torch.randn(5001)
    high, low = empty(x)
    for first, last, loaded, stored in ((True, False, 4, 3), (False, False, 7, 3), (False, True, 7, 2)):
        with counted_traffic() as traffic:
            accumulate(x.clone(), high, low, first, last)
        assert traffic == Traffic(loaded * x.numel(), stored * x.numel())
