"""Times attention on a GPU, forward and backward, beside torch's SDPA and compiled flex_attention.

Plain causal rows, and rows packed with documents of 500 tokens on average, of 2,048 to 32,768 tokens, with heads of
64 and 128, and grouped queries. A window and dropout of the weights are timed with Weft alone.

Before timing, each way's output and gradients are checked against float64. Without a GPU this file times nothing. The
tests run `of_attention` at small sizes, with the host's clock.

The roofline, 100%, is the products of all pairs of a query and a key that it sees, at the rate of a large matmul in
the same run. Weft's kernels compute two of these seven products twice, as no two programs write the same memory.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.attentions import AGAIN, KERNEL, MASK, NEVER, TORCH, Case, truth_of, ways_of
from benchmarks.conftest import Tell
from benchmarks.found import Found, Measure, measured
from benchmarks.timing import Clock, Device

TOKENS = (8192, 2048, 32768, 4096, 16384)  # the most telling first, as the time may run out
ALONE = (8192, 32768)  # for windows and dropout
WINDOW = 1024
NOISE = 0.95  # the least speed of Weft for plain rows, relative to torch's; where torch's runs, the rest is noise


def of_attention(case: Case, device: str, clock: Clock, rounds: int = 10, side: int = 8192) -> Found:
    """The results of a case. side: of the matmul's matrices."""
    operands = case.operands(device)
    ways = ways_of(case, operands)
    product = Measure(
        told="the seven products of the pairs seen",
        call=f"a matmul of {side} x {side}",
        unit="flop",
        done=2 * side**3,
        needed=case.flop,
    )
    calls = {product.call: multiplying(side, device)}
    rows = measured(ways, truth_of(case, operands), calls, product, clock, rounds=rounds, sets=1)
    return Found(case=case.name, rows=rows, absent=ways.absent, failed=ways.failed, measures=[product])


def multiplying(side: int, device: str) -> Callable[[], object]:
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, device=device, generator=generator).bfloat16() for _ in range(2))
    return lambda: left @ right


@pytest.fixture(scope="module")
def clock() -> Device:
    """One clock for all tests: after a failed capture of a CUDA graph, the clock captures no further graphs."""
    return Device()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")
EACH_HEAD = pytest.mark.parametrize("head_dim", [128, 64])


def told(case: Case, tell: Tell, clock: Device) -> dict[str, float]:
    """The median seconds of each way, after all were printed and recorded."""
    found = tell.measuring(of_attention, case, "cuda", clock)
    print(f"\n{found}")
    found.tell_all(tell)
    return {way: float(row["seconds_median"]) for way, row in found.rows.items()}


@needs_gpu
@EACH_HEAD
@pytest.mark.parametrize("tokens", TOKENS)
def test_packed_attention_speed(tokens: int, head_dim: int, tell: Tell, clock: Device) -> None:
    seconds = told(Case.of(tokens, head_dim, packed=True), tell, clock)
    assert MASK not in seconds or seconds["Weft"] < seconds[MASK]


@needs_gpu
@EACH_HEAD
@pytest.mark.parametrize("tokens", TOKENS)
def test_plain_attention_speed(tokens: int, head_dim: int, tell: Tell, clock: Device) -> None:
    """The op runs the faster of torch's and the kernels, once `benchmarks.tune_attention` has measured both."""
    seconds = told(Case.of(tokens, head_dim), tell, clock)
    if TORCH in seconds and AGAIN in seconds:
        assert NOISE * seconds["Weft"] <= max(seconds[TORCH], seconds[AGAIN])
    assert KERNEL in seconds


@needs_gpu
@EACH_HEAD
@pytest.mark.parametrize("options", [{"window": WINDOW}, {"dropout": NEVER}], ids=["window", "dropout"])
@pytest.mark.parametrize("tokens", ALONE)
def test_attention_speed_with_options(
    tokens: int, options: dict[str, float], head_dim: int, tell: Tell, clock: Device
) -> None:
    told(Case.of(tokens, head_dim, **options), tell, clock)
