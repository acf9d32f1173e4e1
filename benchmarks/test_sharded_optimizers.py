"""Compares Weft's sharded optimizers with torch's FSDP2: the time of a step, and the memory of a rank.

Runs llama-tiny on four gloo processes on a CPU, dp=4. In both, each block is gathered on its own. All ways are checked
to compute the same losses, then timed step by step in turn. These are times of the host, and not a GPU's speed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, initialize, lay_out_batch, parallelize
from weft.models.train.measure import CollectiveCount
from weft.models.train.recipes import recipe
from weft.reshard import GradientSync, reshard
from weft.reshard.world.groups import device_mesh

from benchmarks.conftest import Tell
from benchmarks.timing import Timed
from tests.models.test_zero_numbers import held_since
from tests.support.pool import Pool

WARMUP, STEPS = 2, 10
BATCH, TOKENS = 8, 128
RANKS = 4
MODEL = recipe("llama-tiny").model
# For each way the FSDP2 way to compare with: it keeps full parameters equally long, or nearly. "kept" keeps full
# parameters from forward to backward; zero=2 keeps them from step to step.
BESIDE = {"Weft zero=2": "FSDP2 kept", "Weft kept": "FSDP2 kept", "Weft zero=3": "FSDP2", "FSDP2 again": "FSDP2"}
Phase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of one way, measured on one rank."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    collectives: int
    held: dict[str, int]  # bytes of the way's tensors, by phase of a step


def measure() -> dict[str, Measured]:
    """Measures the memory of each way alone, and then times steps of all ways in turn. Runs on every rank."""
    makers = {
        "Weft zero=2": lambda: _weft(2),
        "Weft kept": lambda: _weft(3, regather=False),
        "Weft zero=3": lambda: _weft(3),
        "FSDP2 kept": lambda: _fsdp(reshard_after_forward=False),
        "FSDP2": lambda: _fsdp(reshard_after_forward=True),
        "FSDP2 again": lambda: _fsdp(reshard_after_forward=True),
    }
    held = {name: _held(make) for name, make in makers.items()}
    ways = {name: make() for name, make in makers.items()}
    names = list(ways)
    losses: dict[str, list[float]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARMUP + STEPS):
        first = number % len(names)  # each way follows each other way equally often
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(ways[name](lambda phase: None))
            seconds[name].append(time.perf_counter() - start)
    counts = {}
    for name, step in ways.items():
        with CollectiveCount() as count:
            step(lambda phase: None)
        counts[name] = count.issued.total()
    return {
        name: Measured(tuple(losses[name]), tuple(seconds[name][WARMUP:]), counts[name], held[name]) for name in names
    }


def _held(make: Callable[[], Callable[[Phase], float]]) -> dict[str, int]:
    """Bytes of the floating-point tensors made by a way, in each phase of the second step."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    held: dict[str, int] = {}

    def note(phase: str) -> None:
        held[phase] = held_since(before)

    step = make()
    step(lambda phase: None)
    step(note)
    return held


def _weft(zero: int, *, regather: bool = True) -> Callable[[Phase], float]:
    mesh, model = ProcessMesh.grid(dp=RANKS), _model()
    plan = replace(model.parallel_plan(), zero=zero, regather=regather)
    parallelize(model, mesh, plan)
    sync, optimizer = GradientSync(model), torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = lay_out_batch(mesh, plan, *_batch())

    def step(ended: Phase) -> float:
        loss = reshard(cross_entropy(model(batch.tokens), batch.targets, denominator=float(BATCH * TOKENS)))
        ended("after forward")
        loss.backward()  # type: ignore[no-untyped-call]
        sync.wait()
        ended("after backward")
        optimizer.step()
        optimizer.zero_grad()
        ended("after a step")
        return float(loss.detach().to_local())

    return step


def _fsdp(*, reshard_after_forward: bool) -> Callable[[Phase], float]:
    mesh, model = device_mesh(ProcessMesh.grid(dp=RANKS), "cpu"), _model()
    units = [*model.layers, model.embed_tokens, model.norm, model.lm_head]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, targets = (part.chunk(RANKS)[dist.get_rank()] for part in _batch())

    def step(ended: Phase) -> float:
        loss = cross_entropy(model(tokens), targets)
        ended("after forward")
        loss.backward()  # type: ignore[no-untyped-call]
        ended("after backward")
        optimizer.step()
        optimizer.zero_grad()
        ended("after a step")
        mean = loss.detach() / RANKS
        dist.all_reduce(mean)
        return mean.item()

    return step


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, MODEL.vocab_size, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _model() -> Llama:
    model = Llama(MODEL)
    initialize(model, seed=0)
    return model


@pytest.mark.timeout(600)
def test_sharded_optimizers_beside_fsdp2(pool: Pool, tell: Tell) -> None:
    ranks = tell.measuring(pool.run, measure, ranks=RANKS, timeout=540)
    first = ranks[0]["FSDP2"].losses
    for way in ranks[0].values():
        assert way.losses[:WARMUP] == pytest.approx(first[:WARMUP], rel=1e-5)
    assert first[-1] < first[0], "the steps train"
    # A step takes as long as the slowest rank.
    seconds = {
        name: [max(each) for each in zip(*(rank[name].seconds for rank in ranks), strict=True)] for name in ranks[0]
    }
    print(f"\nstep of llama-tiny, {BATCH} x {TOKENS} tokens, dp={RANKS}, gloo processes, CPU time, {STEPS} steps")
    print(f"{'':14}{'ms':>8}{'time beside':>13} {'':14}{'MB after forward, backward, step':>34}   collectives")
    for name, way in ranks[0].items():
        other = BESIDE.get(name, name)
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))
        held = " ".join(f"{nbytes / 1e6:8.2f}" for nbytes in way.held.values())
        median = statistics.median(seconds[name]) * 1e3
        print(f"{name:14}{median:8.1f}{ratio:13.2f} of {other:11}{held:>34}   {way.collectives}")
        figures = Timed(tuple(seconds[name])).figures | {"collectives": way.collectives}
        figures |= {f"held_bytes_{phase.replace(' ', '_')}": nbytes for phase, nbytes in way.held.items()}
        tell(f"a sharded step of llama-tiny, dp={RANKS}", name, "host_time", **figures)
