"""Times cross-entropy on a CPU beside torch's, forward and backward, in turn on a single thread."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy

from benchmarks.conftest import Tell
from benchmarks.timing import Host, Way, in_turn

SHAPES = ((512, 257), (512, 8192), (64, 32000))


def step(loss: Way, logits: Tensor) -> Tensor:
    logits.grad = None
    loss().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("N", "V"), SHAPES, ids=[f"{N}x{V}" for N, V in SHAPES])
def test_cross_entropy_on_a_cpu(N: int, V: int, dtype: torch.dtype, tell: Tell) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(N, V, generator=generator).to(dtype).requires_grad_()
        target = torch.randint(0, V, (N,), generator=generator)
        ways = {
            "Weft": lambda: step(lambda: cross_entropy(logits, target), logits),
            "torch": lambda: step(lambda: F.cross_entropy(logits.float(), target), logits),
        }
        torch.testing.assert_close(ways["Weft"]().clone(), ways["torch"]().clone())
        found = tell.measuring(in_turn, ways, Host(), rounds=30 if N * V < 1 << 20 else 8)
    finally:
        torch.set_num_threads(threads)
    name = f"cross_entropy on a CPU, {N} x {V} {str(dtype).removeprefix('torch.')}"
    print(f"\n{name}: {found['Weft'].median / found['torch'].median:.2f} of torch's time")
    for way, timed in found.items():
        print(f"{way:8}{timed.median * 1e3:9.3f} ms")
        tell(name, way, "host_time", **timed.figures)
