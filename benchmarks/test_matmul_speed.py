"""Products on a GPU, plain, with gelu and gated: time against torch's GEMM with the same epilogue compiled, and against others.

The budgets are geometric means over tokens and the projections of two Llamas.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

import pytest
import torch

from benchmarks.conftest import Tell
from benchmarks.products import KERNEL, KINDS, SHAPES, TOKENS, Compared, compared
from benchmarks.timing import Device

PLAIN, FUSED = 1.00, 1.10  # of torch's speed, at the least
OF_THE_KERNEL = {512: 0.90, 2048: 0.95}  # by the least K of the products
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_products_beside_torchs(kind: str, tell: Tell) -> None:
    clock = Device()
    found = tell.measuring(lambda: [compared(kind, M, N, K, "cuda", clock) for M in TOKENS for N, K in SHAPES.values()])
    tell_all(found, tell)
    assert geometric_mean(each.of_torch("Weft") for each in found) >= (PLAIN if kind == "plain" else FUSED)
    if kind == "plain":
        assert geometric_mean(each.of_torch(KERNEL) for each in found) >= OF_THE_KERNEL[2048]


@needs_gpu
def test_short_sums(tell: Tell) -> None:
    clock = Device()
    found = tell.measuring(lambda: [compared("plain", M, N, 512, "cuda", clock) for M in TOKENS for N in (4096, 8192)])
    tell_all(found, tell)
    assert geometric_mean(each.of_torch(KERNEL) for each in found) >= OF_THE_KERNEL[512]


def tell_all(found: Sequence[Compared], tell: Tell) -> None:
    for each in found:
        print(f"\n{each}")
        name = f"matmul {each.kind}, {' x '.join(map(str, each.sizes))} bf16"
        for way, timed in each.timed.items():
            tell(name, way, "time", flop=each.flop, flop_per_second=each.flop / timed.median, **timed.figures)
        for way, error in each.failed.items():
            tell(name, way, "time", status="failed", error=error)
