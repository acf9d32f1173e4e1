"""Times products on a GPU, plain, with gelu, gated and of 8 bits, beside torch's GEMM with the compiled epilogue.

Budgets are for geometric means over numbers of tokens and the projections of two Llamas. Budgets hold for products in
the table of measurements, which `./run measure_gpu` fills before running these benchmarks. If products are missing
from the table, times are reported without budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

import pytest
import torch

from benchmarks.conftest import Tell, Time
from benchmarks.products import AGAIN, KERNEL, KINDS, SHAPES, TOKENS, Compared, compared
from benchmarks.timing import Device

PLAIN, FUSED = 1.00, 1.10  # the least speed, relative to torch's
OF_THE_KERNEL = {512: 0.90, 2048: 0.95}  # keyed by the smallest K of the products
SIZES = tuple((M, N, K) for M in TOKENS for N, K in SHAPES.values())
SHORT = tuple((M, N, 512) for M in TOKENS for N in (4096, 8192))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_products_beside_torchs(kind: str, tell: Tell, time: Time) -> None:
    found = measured(kind, SIZES, tell, time)
    skip_unless_complete(found, SIZES)
    check_budgets(kind, found)


@needs_gpu
def test_short_sums(tell: Tell, time: Time) -> None:
    found = measured("plain", SHORT, tell, time)
    skip_unless_complete(found, SHORT)
    check_kernel(found, OF_THE_KERNEL[512])


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "gelu"])
def test_products_beside_those_that_torch_tries_many_for(kind: str, tell: Tell, time: Time) -> None:
    """Times torch.compile with max-autotune, too, which takes long to compile and has no budget."""
    measured(kind, SIZES, tell, time, autotuned=True)


def measured(
    kind: str, sizes: Iterable[tuple[int, int, int]], tell: Tell, time: Time, autotuned: bool = False
) -> list[Compared]:
    """Times the product of each size, until the time is over."""
    clock = Device()
    found = tell.measuring(
        lambda: [compared(kind, *each, "cuda", clock, autotuned=autotuned) for each in time.while_it_lasts(sizes)]
    )
    tell_all(found, tell)
    return found


def skip_unless_complete(found: Sequence[Compared], sizes: Sequence[tuple[int, int, int]]) -> None:
    tuned = sum(each.tuned for each in found)
    if len(found) < len(sizes):
        pytest.skip(f"{len(found)} of {len(sizes)} products were timed in the time there was: no budget is asked")
    if tuned < len(sizes):
        pytest.skip(
            f"{len(sizes) - tuned} of {len(sizes)} products are not in the table: no budget is asked; fill it with "
            "`python -m benchmarks.tune_matmul`"
        )


def check_budgets(kind: str, found: Sequence[Compared]) -> None:
    """Asserts the budgets of a kind of products.

    For plain products Weft runs torch's GEMM where the GEMM is faster. The GEMM is then compared with itself, so the
    budget allows for noise.
    """
    mean = geometric_mean(each.of_torch("Weft") for each in found)
    if kind != "plain":
        assert mean >= FUSED, f"{kind}: {mean:.1%} of torch's speed"
        return
    noise = geometric_mean(each.of_torch(AGAIN) for each in found)
    assert mean >= PLAIN * min(1.0, noise), f"{kind}: {mean:.1%} of torch's speed, torch's own again {noise:.1%}"
    check_kernel(found, OF_THE_KERNEL[2048])


def check_kernel(found: Sequence[Compared], budget: float) -> None:
    mean = geometric_mean(each.of_torch(KERNEL) for each in found)
    assert mean >= budget, f"the kernel: {mean:.1%} of torch's speed"


def tell_all(found: Sequence[Compared], tell: Tell) -> None:
    for each in found:
        print(f"\n{each}")
        name = f"matmul {each.name}"
        for way, timed in each.timed.items():
            tell(name, way, "time", flop=each.flop, flop_per_second=each.flop / timed.median, **timed.figures)
        for way, error in each.failed.items():
            tell(name, way, "time", status="failed", error=error)
