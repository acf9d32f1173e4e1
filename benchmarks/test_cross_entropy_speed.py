"""The losses on a GPU: time against a copy's and three GEMMs', and against torch's, Liger's and Apple's own; peak memory.

The same numbers first: each way's gradient against float64. Without a GPU nothing is timed here. `measured` with the host's
clock and small sizes is how the tests see that it works.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import losses
from benchmarks.conftest import Tell
from benchmarks.losses import Way
from benchmarks.timing import Clock, Device, in_turn

ROWS = 64  # of the gradient, compared with float64
TOLERANCE = 2.0**-7  # of the largest gradient: an ulp of bf16, since what is compared rounded at different places


def measured(ways: Mapping[str, Way], clock: Clock, rounds: int) -> dict[str, dict[str, float]]:
    """Of each way: seconds (median, 20th and 80th percentile), and the bytes that it held at once on a GPU."""
    found: dict[str, dict[str, float]] = {}
    for name, timed in in_turn(ways, clock, rounds=rounds).items():
        p20, p80 = timed.spread
        found[name] = {"seconds": timed.median, "seconds_p20": p20, "seconds_p80": p80}
    if torch.cuda.is_available():
        for name, way in ways.items():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            made = way()
            torch.cuda.synchronize()
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            gradients = made if isinstance(made, (list, tuple)) else ()
            found[name]["gradient_bytes"] = sum(each.nbytes for each in gradients if isinstance(each, Tensor))
            del made, gradients
    return found


def made(N: int, V: int, H: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, H], weight [V, H] and target [N], so that the logits are about randn."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, H, device=device, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(V, H, device=device, generator=generator) / H**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(V, (N,), device=device, generator=generator)


def of_logits(N: int, V: int, device: str, clock: Clock, rounds: int = 20) -> dict[str, dict[str, float]]:
    """Whole logits and one shard of them; `roofline` is the share of what a copy of the logits takes."""
    logits = torch.randn(N, V, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
    target = torch.randint(V, (N,), device=device, generator=torch.Generator(device).manual_seed(1))
    logits.requires_grad_()
    ways, absent = losses.of_logits(logits, target)
    rows = logits.detach()[:ROWS].double().requires_grad_()
    F.cross_entropy(rows, target[:ROWS], reduction="sum").backward()
    for name, way in ways.items():
        gradient = way()[0][:ROWS].double() * N  # type: ignore[index]
        _compare(name, gradient, rows.grad)
    other = torch.empty_like(logits)
    shard = logits.detach()[:, : V // losses.SHARDS].contiguous()
    small = torch.empty_like(shard)
    copies: dict[str, Way] = {
        "a copy of the logits": lambda: other.copy_(logits.detach()),
        "a copy of a shard": lambda: small.copy_(shard),
    }
    found = measured(copies | ways | losses.of_a_shard(shard, target), clock, rounds)
    for name in ways | losses.of_a_shard(shard, target):
        copied = "a copy of a shard" if "shard" in name else "a copy of the logits"
        found[name]["roofline"] = found[copied]["seconds"] / found[name]["seconds"]
    return found | {name: {} for name in absent}


def of_products(N: int, V: int, H: int, device: str, clock: Clock, rounds: int = 10) -> dict[str, dict[str, float]]:
    """`roofline` is the share of what three GEMMs take."""
    x, weight, target = made(N, V, H, device)
    ways, absent = losses.of_products(x, weight, target)
    rows = x.detach()[:ROWS].double().requires_grad_()
    logits = rows @ weight.detach().double().mT
    F.cross_entropy(logits, target[:ROWS], reduction="sum").backward()
    for name, way in ways.items():
        _compare(name, way()[0][:ROWS].double() * N, rows.grad)  # type: ignore[index]
    found = measured({"three GEMMs": losses.three_gemms(x, weight)} | ways, clock, rounds)
    for name in ways:
        found[name]["roofline"] = found["three GEMMs"]["seconds"] / found[name]["seconds"]
    return found | {name: {} for name in absent}


def _compare(name: str, gradient: Tensor, truth: Tensor | None) -> None:
    assert truth is not None, "backward made it"
    error, largest = float((gradient - truth).abs().max()), float(truth.abs().max())
    assert error <= TOLERANCE * largest, f"{name}: the gradient errs by {error:.3g}, of {largest:.3g} at the most"


def told(title: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """A table."""
    lines = [title, f"{'':34}{'ms':>9}{'p20 to p80':>17}{'of roofline':>13}{'GB held':>9}"]
    for name, row in found.items():
        if not row:
            lines.append(f"{name:34}not installed")
            continue
        share = f"{row['roofline']:.1%}" if "roofline" in row else ""
        held = f"{row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in row else ""
        spread = f"{row['seconds_p20'] * 1e3:.3f} to {row['seconds_p80'] * 1e3:.3f}"
        lines.append(f"{name:34}{row['seconds'] * 1e3:9.3f}{spread:>17}{share:>13}{held:>9}")
    return "\n".join(lines)


def _tell_all(tell: Tell, case: str, found: Mapping[str, Mapping[str, float]]) -> None:
    for way, row in found.items():
        names = {"seconds": "seconds_median"}
        figures = {names.get(name, name): value for name, value in row.items()}
        tell(case, way, "time", status="measured" if row else "absent", **figures)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
def test_cross_entropy_speed(tell: Tell) -> None:
    N, V = 8192, 131072
    found = of_logits(N, V, "cuda", Device())
    print(f"\n{told(f'cross-entropy, {N} x {V} bf16, forward and backward; roofline: a copy', found)}")
    _tell_all(tell, f"cross_entropy, {N} x {V} bf16", found)
    assert found["Weft"]["roofline"] >= 0.90
    assert found["Weft, one shard"]["roofline"] >= 0.85


@needs_gpu
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_linear_cross_entropy_speed(tokens: int, tell: Tell) -> None:
    V, H = 128256, 4096
    found = of_products(tokens, V, H, "cuda", Device())
    title = f"linear cross-entropy, {tokens} tokens, H={H}, V={V} bf16, forward and backward; roofline: three GEMMs"
    print(f"\n{told(title, found)}")
    _tell_all(tell, f"linear_cross_entropy, {tokens} tokens, H={H}, V={V} bf16", found)
    assert found["Weft, inplace_backward"]["roofline"] >= 1 / 1.03
