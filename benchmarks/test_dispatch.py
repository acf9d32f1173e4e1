"""Times an op on DTensors on the host: Weft's layout rules beside DTensor's dispatch, and the op on local tensors.

Runs on a single gloo process on a CPU, a mesh of one rank, with operands so small that the op itself takes almost no
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import linear
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute

from benchmarks.conftest import Tell
from benchmarks.timing import Host, Timed, Way, in_turn
from tests.support.pool import Pool

ROUNDS, CALLS = 200, 20


def measure() -> dict[str, Timed]:
    """Times a linear layer, forward and backward, in each way."""
    torch.set_num_threads(1)
    mesh = ProcessMesh.grid(tp=1)
    x, weight = torch.ones(4, 8), torch.ones(16, 8)
    local = [part.clone().requires_grad_() for part in (x, weight)]
    sharded = [distribute(part, Layout(mesh, tp)) for part, tp in ((x, "tp: R"), (weight, "tp: S(0)"))]
    sharded = [part.detach().requires_grad_() for part in sharded]
    for way in (linear, F.linear):
        out = way(*sharded)
        assert isinstance(out, DTensor)
        torch.testing.assert_close(out.to_local(), F.linear(*local))

    def of(way: Callable[..., Tensor], operands: Sequence[Tensor]) -> Way:
        grad = torch.ones_like(way(*operands))
        return lambda: torch.autograd.grad(way(*operands), operands, grad)

    ways = {"Weft": of(linear, sharded), "DTensor": of(F.linear, sharded), "the local op": of(F.linear, local)}
    return in_turn(ways, Host(), rounds=ROUNDS, calls=CALLS, warmup=CALLS)


@pytest.mark.timeout(300)
def test_dispatch(pool: Pool, tell: Tell) -> None:
    (found,) = tell.measuring(pool.run, measure, ranks=1)
    print("\nlinear, forward and backward, [4, 8] x [16, 8], CPU time of the host")
    for way, timed in found.items():
        print(f"{way:16}{timed.median * 1e6:8.1f} us")
        tell("linear, forward and backward", way, "host_time", **timed.figures)
