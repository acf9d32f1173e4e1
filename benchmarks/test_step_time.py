"""A training step of Weft's Llama against the same on torch's tensor parallelism, as a ratio.

Four gloo processes on a CPU, dp=2 x tp=2, the sizes of llama-tiny. Both are checked to compute the same losses, then
timed step by step in turn, so that whatever else the machine does falls on both. These are CPU times: they say what the
host spends, and nothing of a GPU's speed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import Llama, initialize, parallelize
from weft.models.train.observe import CollectiveCount
from weft.models.train.recipes import recipe
from weft.reshard import GradientSync, distribute, reshard
from weft.reshard.groups import device_mesh

from benchmarks.baselines import TorchLlama, average_gradients, parallelize_by_torch
from tests.support.pool import Pool

WARMUP, STEPS = 5, 40
BATCH = (8, 64)
RANKS = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to take a step. seconds: of each step, in order, on rank 0. first_losses: of the warmup."""

    first_losses: list[float]
    seconds: list[float]
    collectives: Counter[str]


def measure() -> dict[str, Measured]:
    """On every rank: steps of Weft, of torch, and of torch once more as the noise floor, in turn."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    tokens = torch.randint(0, 256, (BATCH[0], BATCH[1] + 1), generator=torch.Generator().manual_seed(0))
    ways = {"weft": _weft(mesh, tokens), "torch": _torch(mesh, tokens), "torch again": _torch(mesh, tokens)}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARMUP + STEPS):
        for name, step in ways.items():
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            if number < WARMUP:
                losses[name].append(loss)
            else:
                seconds[name].append(time.perf_counter() - start)
    counts = {}
    for name, step in ways.items():
        with CollectiveCount() as count:
            step()
        counts[name] = count.issued
    return {name: Measured(losses[name], seconds[name], counts[name]) for name in ways}


def _model() -> Llama:
    model = Llama(replace(recipe("llama-tiny").model, vocab_size=256))  # even: torch's loss_parallel needs it so
    initialize(model, seed=0)
    return model


def _weft(mesh: ProcessMesh, tokens: torch.Tensor) -> Callable[[], float]:
    model = _model()
    parallelize(model, mesh, model.parallel_plan())
    sync, optimizer = GradientSync(model), torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, target = (distribute(part, Layout(mesh, "dp: S(0)")) for part in (tokens[:, :-1], tokens[:, 1:]))

    def step() -> float:
        loss = reshard(cross_entropy(model(inputs), target, denominator=float(target.numel())))
        loss.backward()
        sync.wait()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().to_local().item()

    return step


def _torch(mesh: ProcessMesh, tokens: torch.Tensor) -> Callable[[], float]:
    torch_mesh = device_mesh(mesh, "cpu")
    model = parallelize_by_torch(TorchLlama(_model(), tp=2), torch_mesh)
    parameters = list(model.parameters())  # the fused step takes no mixture of tensors and DTensors
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, fused=True)
    part = tokens.chunk(2)[torch_mesh.get_local_rank("dp")]
    data = torch_mesh.get_group("dp")

    def step() -> float:
        with loss_parallel():
            logits = model(part[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            loss.backward()
        average_gradients(model, data)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().to_local() / 2
        dist.all_reduce(mean, group=data)
        return mean.item()

    return step


@pytest.mark.timeout(300)
def test_step_time_against_torch(pool: Pool) -> None:
    measured = pool.run(measure, ranks=RANKS, timeout=240)[0]
    weft, torch_ = measured["weft"], measured["torch"]
    assert weft.first_losses == pytest.approx(torch_.first_losses, rel=1e-5)
    assert weft.collectives.total() <= torch_.collectives.total()
    print(f"\nstep of llama-tiny, {BATCH[0]} x {BATCH[1]} tokens, dp=2 x tp=2, {RANKS} gloo processes, CPU time")
    print(f"{'':12}  {'median ms':>9}  {'p20':>6}  {'p80':>6}  {'ratio to torch':>14}  collectives")
    for name, way in measured.items():
        low, high = (statistics.quantiles(way.seconds, n=5)[i] * 1e3 for i in (0, 3))
        ratio = statistics.median(a / b for a, b in zip(way.seconds, torch_.seconds, strict=True))
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(way.collectives.items()))
        median = statistics.median(way.seconds) * 1e3
        print(f"{name:12}  {median:9.1f}  {low:6.1f}  {high:6.1f}  {ratio:14.2f}  {counted}")
