"""Norms, gates, rope, embedding and dropout on a GPU: time of forward, and of both, against a copy's in the same run, and against torch's and Liger's.

The same numbers first: each way's output and gradients against float64. Without a GPU nothing is timed here; `of_layer` with the
host's clock and small sizes is how the tests see that it works.

The roofline, 100%, is to read and to write what no way does without, at the rate of a copy.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import layers, truth
from benchmarks.conftest import Tell
from benchmarks.found import Found, Measure, measured
from benchmarks.losses import copying
from benchmarks.timing import Clock, Device, sets_for

SIZES = ((8192, 4096), (4096, 8192), (16384, 1024), (2048, 16384))  # tokens, H; the goal is of the first
GOAL = 0.90


def of_layer(name: str, N: int, H: int, device: str, clock: Clock, *, backward: bool, rounds: int = 20) -> Found:
    """One layer, forward alone or with its backward."""
    case = layers.CASES[name]
    count = sets_for(2 * N * H * case.wide) if device == "cuda" else 2
    sets = [layers.operands(case, N, H, device, seed) for seed in range(count)]
    nbytes = 2 * N * H  # of a pass
    passes = sum(case.passes) if backward else case.passes[0]
    ways = layers.ways_of(case, sets, backward)
    what = "forward and backward" if backward else "forward"
    copy = Measure(
        told=f"{passes} passes over [N, H], reads and writes",
        call="a copy",
        unit="bytes",
        done=2 * nbytes,
        needed=passes * nbytes,
    )
    calls = {copy.call: copying([layers.leaves(each)[0].detach() for each in sets])}
    rows = measured(ways, _truth(case, sets[0], backward), calls, copy, clock, rounds=rounds, sets=count)
    return Found(
        case=f"{name}, {N} x {H} bf16, {what}", rows=rows, absent=ways.absent, failed=ways.failed, measures=[copy]
    )


def _truth(case: layers.Case, given: tuple[torch.Tensor, ...], backward: bool) -> truth.Truth:
    wide = [each.detach().double().requires_grad_() if each.requires_grad else each for each in given]
    outputs = layers.as_tuple(case.eager(*wide))
    parts = [truth.Part("output_error", "the output", lambda made: made.loss, outputs[-1].detach(), truth.ROUNDED)]
    if backward:
        gradients = torch.autograd.grad(
            outputs, layers.leaves(tuple(wide)), [each.double() for each in layers.upstream_of(outputs)]
        )
        for i, gradient in enumerate(gradients):
            figure = "gradient_error" if i == 0 else f"gradient_error_{i}"
            parts.append(
                truth.Part(figure, f"gradient {i}", lambda made, i=i: made.gradients[i], gradient, truth.CHUNKED)  # type: ignore[misc]
            )
    return parts


@pytest.fixture(scope="module")
def clock() -> Device:
    """One for all, since after a capture that failed there are no others in this process."""
    return Device()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", layers.CASES)
@pytest.mark.parametrize(("N", "H"), SIZES)  # those of the goal first, of all layers, should time run out
def test_layer_speed(name: str, N: int, H: int, backward: bool, tell: Tell, clock: Device) -> None:
    found = tell.measuring(of_layer, name, N, H, "cuda", clock, backward=backward)
    print(f"\n{found}")
    found.tell_all(tell)
    if SIZES[0] == (N, H):
        assert found.roofline("Weft") >= GOAL
