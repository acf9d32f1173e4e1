"""Times the losses on a GPU beside torch's, Liger's and Apple's losses, and measures peak memory.

Before timing, each way's loss and gradients are checked against float64. Without a GPU this file times nothing. The
tests run `of_logits` and `of_products` at small sizes, with the host's clock.

The roofline, 100%, is the least work of a way at a rate measured on this GPU. The least work is
- for all logits: to read the logits once and write the gradient once, at the rate of a copy;
- for one shard: to read the logits twice, since the gradient waits for the other shards' statistics, and write the
  gradient once; logits which fit in the L2 are read once;
- for linear cross-entropy: three GEMMs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import losses, truth
from benchmarks.conftest import Tell
from benchmarks.found import Found, Measure, measured
from benchmarks.timing import L2_BYTES, Clock, Device, sets_for

LOGITS = (  # tokens, classes; only the first sizes have budgets
    (8192, 131072),
    (4096, 128256),
    (16384, 50257),  # rows which are not aligned to 16 bytes
    (8192, 32000),
    (256, 32000),
)
GOAL = 1.1e9  # bytes above inputs and gradients: a little more than the logits of 4096 tokens and 128256 classes


def of_logits(N: int, V: int, device: str, clock: Clock, rounds: int = 20) -> Found:
    """The results of cross-entropy with all classes, and of one shard of the classes."""
    operands = [_logits(N, V, device, seed) for seed in range(_sets(2 * N * V, device))]
    nbytes, ways = operands[0][0].nbytes, losses.of_logits(operands)
    copy = Measure(
        told="logits read once and their gradient written once",
        call="a copy of the logits", unit="bytes", done=2 * nbytes, needed=2 * nbytes,
    )  # fmt: skip
    calls = {copy.call: losses.copying([logits.detach() for logits, _ in operands])}
    rows = measured(ways, truth.of_logits(*operands[0]), calls, copy, clock, rounds=rounds, sets=len(operands))

    shards = [_shard(*operands[i % len(operands)]) for i in range(_sets(nbytes // losses.SHARDS, device))]
    nbytes = shards[0][0].nbytes
    times = 2 if nbytes >= L2_BYTES else 1
    copy_of_shard = Measure(
        told=f"one shard's logits read {('once', 'twice')[times - 1]} and their gradient written once",
        call="a copy of a shard", unit="bytes", done=2 * nbytes, needed=(times + 1) * nbytes,
    )  # fmt: skip
    calls = {copy_of_shard.call: losses.copying([logits for logits, _ in shards])}
    of_shard = losses.of_a_shard(shards)
    rows |= measured(
        of_shard, truth.of_a_shard(*shards[0]), calls, copy_of_shard, clock, rounds=rounds, sets=len(shards)
    )
    return Found(
        case=f"cross_entropy, {N} x {V} bf16", rows=rows, absent=ways.absent, failed=ways.failed | of_shard.failed,
        measures=[copy, copy_of_shard],
    )  # fmt: skip


def of_products(N: int, V: int, H: int, device: str, clock: Clock, rounds: int = 10) -> Found:
    """The results of linear cross-entropy."""
    x, weight, target = _factors(N, V, H, device)
    ways, flop = losses.of_products([(x, weight, target)]), 6 * N * H * V
    measure = Measure(told="three GEMMs", call="three GEMMs", unit="flop", done=flop, needed=flop)
    gemms = losses.three_gemms(x, weight)
    calls = {measure.call: gemms, "three GEMMs, again": gemms}
    rows = measured(ways, truth.of_products(x, weight, target), calls, measure, clock, rounds=rounds, sets=1)
    case = f"linear_cross_entropy, {N} tokens, H={H}, V={V} bf16"
    return Found(case=case, rows=rows, absent=ways.absent, failed=ways.failed, measures=[measure])


def _sets(nbytes: int, device: str) -> int:
    return sets_for(nbytes) if device == "cuda" else 2


def _logits(N: int, V: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Random logits [N, V] and targets [N]."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(N, V, device=device, generator=generator).bfloat16().requires_grad_()
    return logits, torch.randint(V, (N,), device=device, generator=generator)


def _shard(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the first of SHARDS shards of the logits, and the targets among all classes."""
    return logits.detach()[:, : logits.shape[1] // losses.SHARDS].clone(memory_format=torch.contiguous_format), target


def _factors(N: int, V: int, H: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, H], weight [V, H] and targets [N], with approximately standard normal logits."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, H, device=device, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(V, H, device=device, generator=generator) / H**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(V, (N,), device=device, generator=generator)


@pytest.fixture(scope="module")
def clock() -> Device:
    """One clock for all tests: after a failed capture of a CUDA graph, the clock captures no further graphs."""
    return Device()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
@pytest.mark.parametrize(("N", "V"), LOGITS)
def test_cross_entropy_speed(N: int, V: int, tell: Tell, clock: Device) -> None:
    found = tell.measuring(of_logits, N, V, "cuda", clock)
    print(f"\n{found}")
    found.tell_all(tell)
    if LOGITS[0] == (N, V):
        assert found.roofline("Weft") >= 0.90
        assert found.roofline("Weft, one shard") >= 0.85


@needs_gpu
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_linear_cross_entropy_speed(tokens: int, tell: Tell, clock: Device) -> None:
    found = tell.measuring(of_products, tokens, 128256, 4096, "cuda", clock)
    print(f"\n{found}")
    found.tell_all(tell)
    for way in ("Weft", losses.FLOAT32):
        assert float(found.rows[way]["peak_bytes"]) <= GOAL
        assert found.roofline(way) >= 1 / 1.03
