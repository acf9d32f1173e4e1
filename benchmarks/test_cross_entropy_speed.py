"""The losses on a GPU: time against a copy's and three GEMMs', and against torch's, Liger's and Apple's own; peak memory.

The same numbers first: each way's loss and gradients against float64. Without a GPU nothing is timed here; `of_logits` and
`of_products` with the host's clock and small sizes are how the tests see that it works.

The roofline, 100%, is what no way does without, at the rate that this GPU reaches: of whole logits to read them once and to
write their gradient once, as a copy of them does; of a shard to read them twice, since the gradient waits for the others'
statistics, and to write once (what the L2 holds is read once); of linear cross-entropy three GEMMs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import losses, truth
from benchmarks.conftest import Tell
from benchmarks.found import Found, Measure, measured
from benchmarks.timing import L2_BYTES, Clock, Device, sets_for

LOGITS = (  # tokens, classes; the budgets are of the first
    (8192, 131072),
    (4096, 128256),
    (16384, 50257),  # rows that begin at odd addresses
    (8192, 32000),
    (256, 32000),
)
GOAL = 1.1e9  # bytes above inputs and gradients: the logits of 4096 tokens of 128256 classes, and little beside them


def of_logits(N: int, V: int, device: str, clock: Clock, rounds: int = 20) -> Found:
    """Whole logits, and one shard of them."""
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
    """Linear cross-entropy."""
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
    """Logits [N, V] and target [N], at random."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(N, V, device=device, generator=generator).bfloat16().requires_grad_()
    return logits, torch.randint(V, (N,), device=device, generator=generator)


def _shard(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first of SHARDS shards, in memory of its own; the target is of all classes."""
    return logits.detach()[:, : logits.shape[1] // losses.SHARDS].clone(memory_format=torch.contiguous_format), target


def _factors(N: int, V: int, H: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, H], weight [V, H] and target [N], so that the logits are about randn."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, H, device=device, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(V, H, device=device, generator=generator) / H**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(V, (N,), device=device, generator=generator)


@pytest.fixture(scope="module")
def clock() -> Device:
    """One for all, since after a capture that failed there are no others in this process."""
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
