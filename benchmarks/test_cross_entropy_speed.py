"""The losses on a GPU: time against a copy's and three GEMMs', and against torch's, Liger's and Apple's own; peak memory.

The same numbers first: each way's gradient against float64. Without a GPU nothing is timed here; `of_logits` and
`of_products` with the host's clock and small sizes are how the tests see that it works.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import losses
from benchmarks.compiled import Report, compiled, dearest
from benchmarks.conftest import Tell
from benchmarks.losses import Way
from benchmarks.timing import Clock, Device, in_turn, sets_for

ROWS = 64  # of the gradient, compared with float64
TOLERANCE = 2.0**-7  # of the largest gradient: an ulp of bf16, since what is compared rounded at different places
LOGITS = (  # tokens, classes; the budgets are of the first
    (8192, 131072),
    (4096, 128256),
    (16384, 50257),  # rows that begin at odd addresses
    (8192, 32000),
    (256, 32000),
)

Row = dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was measured. rows: the figures of each way.  absent: ways whose package is not installed.  failed: why, of each."""

    case: str
    rows: dict[str, Row]
    absent: list[str]
    failed: Mapping[str, str]

    def roofline(self, way: str) -> float:
        return float(self.rows[way]["roofline"])

    def __str__(self) -> str:
        """A table."""
        lines = [f"{self.case}: forward and backward"]
        lines += [f"{'':34}{'ms':>9}{'p20 to p80':>17}{'of roofline':>13}{'GB held':>9}"]
        for name, row in self.rows.items():
            share = f"{row['roofline']:.1%}" if "roofline" in row else ""
            held = f"{float(row['peak_bytes']) / 1e9:.2f}" if "peak_bytes" in row else ""
            median, p20, p80 = (float(row[f"seconds_{which}"]) * 1e3 for which in ("median", "p20", "p80"))
            spread = f"{p20:.3f} to {p80:.3f}"
            lines.append(f"{name:34}{median:9.3f}{spread:>17}{share:>13}{held:>9}")
        lines += [f"{name:34}not installed" for name in self.absent]
        return "\n".join(lines + [f"{name:34}failed: {error}" for name, error in self.failed.items()])

    def tell_all(self, tell: Tell) -> None:
        for way, row in self.rows.items():
            tell(self.case, way, "time", **row)
        for way in self.absent:
            tell(self.case, way, "time", status="absent")
        for way, error in self.failed.items():
            tell(self.case, way, "time", status="failed", error=error)


def of_logits(N: int, V: int, device: str, clock: Clock, rounds: int = 20) -> Found:
    """Whole logits and one shard of them; `roofline` is the share of what a copy of the logits takes."""
    sets = sets_for(2 * N * V) if device == "cuda" else 2
    operands = [_logits(N, V, device, seed) for seed in range(sets)]
    shards = [(x.detach()[:, : V // losses.SHARDS].contiguous(), target) for x, target in operands]
    ways, absent = losses.of_logits(operands)
    rows = operands[0][0].detach()[:ROWS].double().requires_grad_()
    F.cross_entropy(rows, operands[0][1][:ROWS], reduction="sum").backward()
    errors, failed = _errors(ways, N, rows.grad)
    copies = {
        "a copy of the logits": _copying([logits.detach() for logits, _ in operands]),
        "a copy of a shard": _copying([logits for logits, _ in shards]),
    }
    ways = {name: ways[name] for name in errors}
    of_shard = losses.of_a_shard(shards)
    found = _measured(copies | ways | of_shard, clock, rounds, sets)
    for name in ways | of_shard:
        copied, local = ("a copy of a shard", shards) if name in of_shard else ("a copy of the logits", operands)
        found[name] |= _shares(found[copied], found[name], bytes=2 * local[0][0].nbytes)
    for name, error in errors.items():
        found[name]["gradient_error"] = error
    return Found(case=f"cross_entropy, {N} x {V} bf16", rows=found, absent=absent, failed=failed)


def of_products(N: int, V: int, H: int, device: str, clock: Clock, rounds: int = 10) -> Found:
    """`roofline` is the share of what three GEMMs take."""
    x, weight, target = _factors(N, V, H, device)
    ways, absent = losses.of_products([(x, weight, target)])
    rows = x.detach()[:ROWS].double().requires_grad_()
    logits = rows @ weight.detach().double().mT
    F.cross_entropy(logits, target[:ROWS], reduction="sum").backward()
    errors, failed = _errors(ways, N, rows.grad)
    ways = {name: ways[name] for name in errors}
    gemms = losses.three_gemms(x, weight)
    found = _measured({"three GEMMs": gemms, "three GEMMs, again": gemms} | ways, clock, rounds, 1)
    for name, error in errors.items():
        found[name] |= _shares(found["three GEMMs"], found[name], flop=6 * N * H * V)
        found[name]["gradient_error"] = error
    return Found(case=f"linear_cross_entropy, {N} tokens, H={H}, V={V} bf16", rows=found, absent=absent, failed=failed)


def _logits(N: int, V: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and target [N], at random."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(N, V, device=device, generator=generator).bfloat16().requires_grad_()
    return logits, torch.randint(V, (N,), device=device, generator=generator)


def _factors(N: int, V: int, H: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, H], weight [V, H] and target [N], so that the logits are about randn."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, H, device=device, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(V, H, device=device, generator=generator) / H**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(V, (N,), device=device, generator=generator)


def _copying(sources: list[Tensor]) -> Way:
    turns = itertools.cycle([(source, torch.empty_like(source)) for source in sources])

    def way() -> list[Tensor]:
        source, copy = next(turns)
        copy.copy_(source)
        return []

    return way


def _measured(ways: Mapping[str, Way], clock: Clock, rounds: int, sets: int) -> dict[str, Row]:
    """Of each way: seconds (median, 20th and 80th percentile), by which timer, and the bytes that it held on a GPU."""
    found: dict[str, Row] = {
        name: each.figures for name, each in in_turn(ways, clock, rounds=rounds, calls=sets).items()
    }
    if torch.cuda.is_available():
        for name, way in ways.items():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gradients = way()
            torch.cuda.synchronize()
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            found[name]["gradient_bytes"] = sum(each.nbytes for each in gradients)
            del gradients
    return found


def _shares(least: Row, row: Row, **needed: int) -> Row:
    """needed: the bytes or the flop that no way does without, and what it makes of them in a second."""
    seconds = float(row["seconds_median"])
    rates = {f"{name}_per_second": amount / seconds for name, amount in needed.items()}
    return {"roofline": float(least["seconds_median"]) / seconds, **needed, **rates}


def _errors(ways: Mapping[str, Way], N: int, truth: Tensor | None) -> tuple[dict[str, float], dict[str, str]]:
    """Of each way: how far the gradient of its mean over N tokens errs; or, of another's that fails, why.

    Raises AssertionError for a gradient that is wrong, and what Weft's ways raise.
    """
    errors, failed = {}, {}
    for name, way in ways.items():
        try:
            gradient = way()[0][:ROWS].double() * N
        except Exception as error:  # whatever a package that is not ours does on this machine
            if name.startswith("Weft"):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            errors[name] = _error(name, gradient, truth)
    return errors, failed


def _error(name: str, gradient: Tensor, truth: Tensor | None) -> float:
    """Of the largest gradient. Raises AssertionError where it is more than rounding."""
    assert truth is not None, "backward made it"
    error, largest = float((gradient - truth).abs().max()), float(truth.abs().max())
    assert error <= TOLERANCE * largest, f"{name}: the gradient errs by {error:.3g}, of {largest:.3g} at the most"
    return error / largest


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Of the kernels, compiled for this GPU."""
    major, minor = torch.cuda.get_device_capability()
    return compiled(f"sm_{major}{minor}")


def _kernels(reports: Sequence[Report], V: int) -> Row:
    """What the kernels of a loss of bf16 logits cost, and how they are launched for V classes."""
    from weft.kernels.cross_entropy.launch import config

    launch = config(V)
    variants = [
        f"cross_entropy.{name}" for name in ("statistics/bf16-contiguous", "losses/fp32", "gradient/bf16-contiguous")
    ]
    return {**dearest(reports, variants), "configuration": f"{launch.block_v} classes at a time, {launch.warps} warps"}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
@pytest.mark.parametrize(("N", "V"), LOGITS)
def test_cross_entropy_speed(N: int, V: int, tell: Tell, reports: list[Report]) -> None:
    found = tell.measuring(of_logits, N, V, "cuda", Device())
    found.rows["Weft"].update(_kernels(reports, V))
    print(f"\n{found}; roofline: a copy")
    found.tell_all(tell)
    if LOGITS[0] == (N, V):
        assert found.roofline("Weft") >= 0.90
        assert found.roofline("Weft, one shard") >= 0.85


@needs_gpu
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_linear_cross_entropy_speed(tokens: int, tell: Tell) -> None:
    found = tell.measuring(of_products, tokens, 128256, 4096, "cuda", Device())
    print(f"\n{found}; roofline: three GEMMs")
    found.tell_all(tell)
    assert found.roofline("Weft, inplace_backward") >= 1 / 1.03
