"""Times a training step of Weft's Llama relative to the same Llama on torch's tensor parallelism.

Runs llama-tiny on four gloo processes on a CPU, dp=2 x tp=2. Both are checked to compute the same losses, then timed
step by step in turn, so that other load on the machine slows both alike. These are times of the host, and not a GPU's
speed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import Llama, initialize, parallelize
from weft.models.train.measure import CollectiveCount
from weft.models.train.recipes import recipe
from weft.reshard import GradientSync, distribute, reshard
from weft.reshard.world.groups import device_mesh

from benchmarks.baselines import TorchLlama, average_gradients, parallelize_by_torch
from benchmarks.conftest import Tell
from benchmarks.timing import Timed
from tests.support.pool import Pool

WARMUP, STEPS = 5, 40
BATCH, TOKENS = 8, 128
RANKS = 4
MODEL = recipe("llama-tiny").model  # the vocabulary of 257 is sharded unevenly, in both


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of one way, measured on one rank."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # of each step after the warmup, in order
    collectives: Counter[str]


def measure() -> dict[str, Measured]:
    """Times steps of Weft, of torch, and of torch again as the noise floor, in turn. Runs on every rank."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    ids = torch.randint(0, MODEL.vocab_size, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    tokens, target = ids[:, :-1], ids[:, 1:].contiguous()
    ways = {
        "weft": _weft(mesh, tokens, target),
        "torch": _torch(mesh, tokens, target),
        "torch again": _torch(mesh, tokens, target),
    }
    names = list(ways)
    losses: dict[str, list[float]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARMUP + STEPS):
        first = number % len(names)  # each way follows each other way equally often
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(ways[name]())
            seconds[name].append(time.perf_counter() - start)
    counts = {}
    for name, step in ways.items():
        with CollectiveCount() as count:
            step()
        counts[name] = count.issued
    return {name: Measured(tuple(losses[name]), tuple(seconds[name][WARMUP:]), counts[name]) for name in names}


def _weft(mesh: ProcessMesh, tokens: torch.Tensor, target: torch.Tensor) -> Callable[[], float]:
    model = _model()
    parallelize(model, mesh, model.parallel_plan())
    sync, optimizer = GradientSync(model), _adamw(model)
    tokens, target = (distribute(part, Layout(mesh, "dp: S(0)")) for part in (tokens, target))

    def step() -> float:
        loss = reshard(cross_entropy(model(tokens), target, denominator=float(target.numel())))
        loss.backward()
        sync.wait()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().item()

    return step


def _torch(mesh: ProcessMesh, tokens: torch.Tensor, target: torch.Tensor) -> Callable[[], float]:
    """torch's step, with loss_parallel and a fused AdamW. Gathered logits or a foreach AdamW were not faster."""
    torch_mesh = device_mesh(mesh, "cpu")
    model = parallelize_by_torch(TorchLlama(_model()), torch_mesh)
    optimizer = _adamw(model)
    part, group = torch_mesh.get_local_rank("dp"), torch_mesh.get_group("dp")
    tokens, target = tokens.chunk(2)[part], target.chunk(2)[part]

    def step() -> float:
        with loss_parallel():
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            loss.backward()
        mean = loss.detach().to_local() / 2
        dist.all_reduce(mean, group=group)
        average_gradients(model, group)
        optimizer.step()
        optimizer.zero_grad()
        return mean.item()

    return step


def _model() -> Llama:
    model = Llama(MODEL)
    initialize(model, seed=0)
    return model


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """A fused AdamW, with a parameter group of tensors and a group of DTensors, as a fused step takes no mixture."""
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-3, fused=True)


@pytest.mark.timeout(600)
def test_step_time_against_torch(pool: Pool, tell: Tell) -> None:
    ranks = tell.measuring(pool.run, measure, ranks=RANKS, timeout=540)
    weft, torch_ = ranks[0]["weft"], ranks[0]["torch"]
    assert weft.losses[0] == pytest.approx(torch_.losses[0], rel=1e-6)
    assert weft.losses[:WARMUP] == pytest.approx(torch_.losses[:WARMUP], rel=1e-5)  # rounding differences grow
    assert weft.losses[-1] < weft.losses[0] - 1, "the steps train"
    assert weft.collectives.total() <= torch_.collectives.total()
    # A step takes as long as the slowest rank.
    seconds = {
        name: [max(each) for each in zip(*(rank[name].seconds for rank in ranks), strict=True)] for name in ranks[0]
    }
    print(
        f"\nstep of llama-tiny, {BATCH} x {TOKENS} tokens, dp=2 x tp=2, {RANKS} gloo processes, CPU time, {STEPS} steps"
    )
    print(f"{'':12}{'ms (p20 - p80)':>22}{'ratio to torch (p20 - p80)':>30}   collectives of a step")
    for name, way in ranks[0].items():
        times = _spread([each * 1e3 for each in seconds[name]], 1)
        ratios = _spread([a / b for a, b in zip(seconds[name], seconds["torch"], strict=True)], 2)
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(way.collectives.items()))
        print(f"{name:12}{times:>22}{ratios:>30}   {counted}")
        figures = Timed(tuple(seconds[name])).figures | {"collectives": way.collectives.total()}
        tell("a step of llama-tiny, dp=2 x tp=2", name.replace("weft", "Weft"), "host_time", **figures)


def _spread(values: Sequence[float], digits: int) -> str:
    """The median (20th percentile - 80th percentile)."""
    low, *_, high = statistics.quantiles(values, n=5)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"
