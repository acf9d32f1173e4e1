"""Times norms, gates, rope, embedding and dropout on a GPU, beside torch's and Liger's.

Forward is timed alone, and with backward.

Before timing, each way's output and gradients are checked against float64. Without a GPU this file times nothing. The
tests run `of_layer` at small sizes, with the host's clock.

The roofline, 100%, is the fewest reads and writes of the layer, at the rate of a copy in the same run.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import layers, truth
from benchmarks.conftest import Tell
from benchmarks.found import Found, Measure, measured
from benchmarks.losses import copying
from benchmarks.timing import Clock, Device, sets_for

SIZES = ((8192, 4096), (4096, 8192), (16384, 1024), (2048, 16384))  # tokens, H; GOAL is for the first sizes
GOAL = 0.90


def of_layer(name: str, N: int, H: int, device: str, clock: Clock, *, backward: bool, rounds: int = 20) -> Found:
    """The results of a layer. backward: time forward and backward, not only forward."""
    case = layers.CASES[name]
    count = sets_for(2 * N * H * case.wide) if device == "cuda" else 2
    sets = [layers.operands(case, N, H, device, seed) for seed in range(count)]
    nbytes = 2 * N * H  # bytes of a pass
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
    """One clock for all tests: after a failed capture of a CUDA graph, the clock captures no further graphs."""
    return Device()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of kernels is not measured")


@needs_gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", layers.CASES)
@pytest.mark.parametrize(("N", "H"), SIZES)  # the sizes of GOAL first, for all layers, as the time may run out
def test_layer_speed(name: str, N: int, H: int, backward: bool, tell: Tell, clock: Device) -> None:
    found = tell.measuring(of_layer, name, N, H, "cuda", clock, backward=backward)
    print(f"\n{found}")
    found.tell_all(tell)
    if SIZES[0] == (N, H):
        assert found.roofline("Weft") >= GOAL
