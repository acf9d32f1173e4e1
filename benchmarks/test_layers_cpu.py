"""Times layers and products on a CPU beside torch's own ops, forward and backward, in turn on one thread.

CPU times are compared, which other programs on the machine change least. torch's ops are timed twice: the ratio of the
two times is the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft import kernels

from benchmarks import layers
from benchmarks.conftest import Tell
from benchmarks.layers import Case
from benchmarks.timing import Processor, in_turn

SIZES = (512, 512), (512, 2048), (2048, 2048)  # tokens, H
PRODUCTS = {
    "linear": Case(weft=kernels.linear, eager=F.linear, takes="x square weight", passes=(2, 3)),
    "matmul": Case(weft=kernels.matmul, eager=torch.matmul, takes="x square", passes=(2, 3)),
}
CASES: Mapping[str, Case] = {**layers.CASES, **PRODUCTS}
# Layers timed with other arguments than checked: torch's dropout would be faster with a probability of almost 0.
TIMED = {"dropout, residual": layers.drops(0.1)}
SECONDS = 0.7  # of each way, with the number of rounds between the two ROUNDS
ROUNDS = 20, 300


def way(layer: Callable[..., Any], given: tuple[Tensor, ...], upstream: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A way to compute the outputs of a layer and the gradients of its operands."""
    wanted = layers.leaves(given)

    def step() -> list[Tensor]:
        outputs = layers.as_tuple(layer(*given))
        return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]

    return step


def rounds_for(step: Callable[[], object]) -> int:
    """The number of rounds which take about SECONDS."""
    took = min(Processor()(step)() for _ in range(3))
    return max(ROUNDS[0], min(ROUNDS[1], round(SECONDS / took)))


@pytest.mark.parametrize("N, H", SIZES, ids=lambda size: str(size))
@pytest.mark.parametrize("name", CASES)
def test_a_layer_on_a_cpu(name: str, N: int, H: int, tell: Tell) -> None:
    case = CASES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Freed at once; afterwards glibc keeps freed memory of this size, so later allocations get no fresh pages.
    torch.empty(30 << 20, dtype=torch.uint8)
    try:
        given = layers.operands(case, N, H, "cpu", 0, torch.float32)
        upstream = layers.upstream_of(layers.as_tuple(case.eager(*given)), torch.float32)
        timed = TIMED.get(name, case)
        steps = [way(layer, given, upstream) for layer in (case.weft, case.eager)]
        for ours, theirs in zip(*[step() for step in steps], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.detach().abs().max()))
        layered = {"Weft": timed.weft, "torch": timed.eager, "torch again": timed.eager}
        ways = {which: way(layer, given, upstream) for which, layer in layered.items()}
        found = tell.measuring(in_turn, ways, Processor(), rounds=rounds_for(ways["torch"]))
    finally:
        torch.set_num_threads(threads)
    titled = f"{name} on a CPU, {N} x {H} float32"
    weft, again = (found[which].median / found["torch"].median for which in ("Weft", "torch again"))
    print(f"\n{titled}: {weft:.3f} of torch's time, whose own once more is {again:.3f}")
    for which, each in found.items():
        print(f"{which:12}{each.median * 1e3:9.3f} ms")
        tell(titled, which, "host_time", **each.figures)
