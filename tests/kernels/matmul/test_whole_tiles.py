"""The configurations of GPUs, at three tiles a dim and more.

Interpreted; on a GPU with more tiles than multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from weft.kernels.matmul import variants
from weft.kernels.matmul.configurations import (
    BY_POINTERS,
    EIGHT_BITS,
    FLAT,
    LARGE,
    MIDDLE,
    NOT_ALIGNED,
    ON_AMD,
    SINGLE,
    Configuration,
    adapt_to_groups,
    halve_tiles,
)

from .cases import assert_as_good_as_eager, expected, normal
from .test_grouped import eager, ends
from .test_tiles import WAYS

CONFIGURATIONS = {
    "large": LARGE,
    "middle": MIDDLE,
    "flat": FLAT,
    "specialized": variants.SPECIALIZED,
    "large-split": replace(LARGE, splits=3),
    "middle-split": replace(MIDDLE, splits=2),
    "by-pointers": BY_POINTERS,
    "by-pointers-split": replace(BY_POINTERS, splits=2),
    "not-aligned": NOT_ALIGNED,
    "on-amd": ON_AMD,
    **{f"small-{name}": way for name, way in WAYS.items()},
}
TRANSPOSED = pytest.mark.parametrize("transposed", ["", "a", "b", "ab"], ids=["none", "a", "b", "both"])


def on_kernels(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test interpreted, which takes seconds, and on a GPU; test_tiles.py has a short version with small tiles."""
    devices = ["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)]
    return pytest.mark.exhaustive(pytest.mark.parametrize("device", devices, indirect=True)(test))


def sizes(of: Configuration, device: str) -> tuple[int, int, int]:
    """M, N and K: the last tile of each is cut. Of a GPU's programs some have two tiles."""
    rows = 3 if device == "cpu" else 13
    M, N, K = of.tile_m * (rows - 1) + 9, of.tile_n * (rows - 1) + 8, of.tile_k * max(3, of.splits) + 8
    return (M, N, K) if of.descriptors else (M, N - 1, K - 1)


def factors(
    of: Configuration, transposed: str, device: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Transposed factors have rows of 16-byte multiples, too, as descriptors need."""
    M, N, K = sizes(of, device)
    wide = -(-M // 8) * 8
    if "a" in transposed:
        a = normal(K, wide, dtype=dtype).to(device).mT[:M]  # moved first: a moved slice has rows of its own length
    else:
        a = normal(M, K, dtype=dtype).to(device)
    b = normal(N, K, dtype=dtype).mT if "b" in transposed else normal(K, N, dtype=dtype)
    return a, b.to(device)


@on_kernels
@TRANSPOSED
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_product_and_what_follows_it(name: str, transposed: str, device: str) -> None:
    from weft.kernels.matmul import launch

    chosen = CONFIGURATIONS[name]
    a, b = factors(chosen, transposed, device)
    assert (launch.has_descriptor(a) and launch.has_descriptor(b)) or not chosen.descriptors
    (M, _), N = a.shape, b.shape[1]
    bias, residual = (normal(*shape, dtype=torch.bfloat16, seed=2).to(device) for shape in ((N,), (M, N)))
    found, z = (torch.empty(M, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    launch.product(a, b, bias, residual, None, None, found, z, "gelu", configuration=chosen)
    wide = [each.double() for each in (a, b, bias)]
    assert_as_good_as_eager(found, expected(a, b, bias, "gelu", residual), expected(*wide, "gelu", residual.double()))
    assert_as_good_as_eager(z, expected(a, b, bias), expected(*wide))


@on_kernels
@pytest.mark.parametrize("name", ["middle", "large-split", "by-pointers-split", "not-aligned"])
def test_a_sum_is_added_to(name: str, device: str) -> None:
    """The sum is float32, as weight gradients of microbatches are. Batched products have a sum each."""
    from weft.kernels.matmul import launch

    chosen = CONFIGURATIONS[name]
    a, b = factors(chosen, "a", device)
    total = normal(len(a), b.shape[1], seed=3).float().to(device)
    truth, rounded = total.double() + a.double() @ b.double(), total + a.float() @ b.float()
    launch.product(a, b, None, None, None, None, total, None, accumulate=True, configuration=chosen)
    assert_as_good_as_eager(total, rounded, truth)
    both = torch.stack([a.mT, a.mT * 2]).mT  # [2, M, K], which lie as a does
    out = torch.empty(2, len(a), b.shape[1], device=device)
    launch.product(both, b.expand(2, *b.shape), None, None, None, None, out, None, configuration=chosen)
    for one, scale in zip(out, (1, 2), strict=True):
        product = scale * (a.double() @ b.double())
        assert_as_good_as_eager(one, product.float(), product)


@on_kernels
@TRANSPOSED
@pytest.mark.parametrize("name", ["large", "middle", "by-pointers"])
def test_a_product_times_the_slope(name: str, transposed: str, device: str) -> None:
    from weft.kernels.matmul import launch

    chosen = CONFIGURATIONS[name]
    a, b = factors(chosen, transposed, device)
    z = normal(len(a), b.shape[1], dtype=torch.bfloat16, seed=4).to(device)
    found = torch.empty_like(z)
    launch.product(a, b, None, z, None, None, found, None, slope="silu", configuration=chosen)
    one = torch.sigmoid(z.double())
    truth = (a.double() @ b.double()) * (one * (1 + z.double() * (1 - one)))
    assert_as_good_as_eager(found, truth.bfloat16(), truth)


@on_kernels
@pytest.mark.parametrize("name", ["large", "middle", "by-pointers", "not-aligned"])
def test_two_products_and_their_gate(name: str, device: str) -> None:
    from weft.kernels.matmul import launch

    chosen = halve_tiles(CONFIGURATIONS[name])
    x, gate = factors(chosen, "b", device)
    up = normal(*gate.mT.shape, dtype=torch.bfloat16, seed=5).to(device).mT
    out, z, z_up = (torch.empty(len(x), gate.shape[1], dtype=torch.bfloat16, device=device) for _ in range(3))
    launch.gated(x, gate, up, out, z, z_up, configuration=chosen)
    wide = x.double(), gate.double(), up.double()
    left, right = wide[0] @ wide[1], wide[0] @ wide[2]
    truth = left * torch.sigmoid(left) * right
    assert_as_good_as_eager(out, torch.nn.functional.silu(x @ gate) * (x @ up), truth)
    for one, true in ((z, left), (z_up, right)):
        assert_as_good_as_eager(one, true.bfloat16(), true)


@on_kernels
def test_factors_of_8_bits_with_a_scale_a_row(device: str) -> None:
    from weft.kernels.matmul import launch

    M, N, K = sizes(EIGHT_BITS, device)
    N, K = N + 8, K + 8  # rows of 16 bytes
    a, b = (normal(*shape).to(torch.float8_e4m3fn).to(device) for shape in ((M, K), (N, K)))
    of_a, of_b = (normal(size, dtype=torch.float32).abs().to(device) for size in (M, N))
    found = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    launch.product(a, b.mT, None, None, of_a, of_b, found, None, configuration=EIGHT_BITS)
    truth = a.double() @ b.double().mT * of_a[:, None].double() * of_b.double()
    assert_as_good_as_eager(found, truth.bfloat16(), truth)


@on_kernels
def test_float32(device: str) -> None:
    from weft.kernels.matmul import launch

    a, b = factors(SINGLE, "b", device, torch.float32)
    found = torch.empty(len(a), b.shape[1], device=device)
    launch.product(a, b, None, None, None, None, found, None, configuration=SINGLE)
    truth = a.double() @ b.double()
    assert_as_good_as_eager(found, truth.float(), truth)


@on_kernels
@pytest.mark.parametrize("name", ["large", "middle", "by-pointers"])
def test_groups_of_rows(name: str, device: str) -> None:
    """Forward and the matrices' gradient: groups of a tile and a part, of none, and of several tiles."""
    from weft.kernels.grouped_matmul import launch

    chosen = adapt_to_groups(CONFIGURATIONS[name])
    lengths = [chosen.tile_m + 5, 0, 3 * chosen.tile_m, 1]
    M, K = chosen.tile_n * 2 + 8, chosen.tile_k * 3 + 8
    a = normal(sum(lengths), K, dtype=torch.bfloat16).to(device)
    b = normal(len(lengths), K, M, dtype=torch.bfloat16).to(device)
    out = torch.empty(len(a), M, dtype=torch.bfloat16, device=device)
    launch.forward(a, b, ends(lengths).to(device), None, None, None, None, out, None, configuration=chosen)
    assert_as_good_as_eager(out, eager(a, b, lengths), eager(a.double(), b.double(), lengths))
    grad = normal(len(a), M, dtype=torch.bfloat16, seed=6).to(device)
    of_b = torch.empty(b.shape, dtype=torch.float32, device=device)
    launch.weights(a, grad, ends(lengths).to(device), of_b, configuration=chosen)
    start = 0
    for length, one in zip(lengths, of_b, strict=True):
        rows = slice(start, start := start + length)
        truth = a[rows].double().mT @ grad[rows].double()
        assert_as_good_as_eager(one, truth.float(), truth)
