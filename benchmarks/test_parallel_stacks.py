"""Times a training step of Weft beside torch's own stack.

torch's stack is DistributedDataParallel for the model of the default recipe. For a smaller model it is
`parallelize_module`, `fully_shard` and `torch.distributed.pipelining`. Steps run on one, two, four or eight gloo
processes on a CPU, on meshes of dp, tp and pp. Both stacks are checked to compute the same losses, then timed step by
step in turn: in wall-clock time, and in CPU time of all ranks, which other load on the machine changes less. These
are times of the host, and not a GPU's speed.

Without tp both stacks compute on plain tensors, and steps are small, so the times show the host's overhead around the
ops. With more processes than cores, each process has fewer rows, and the overhead of a step counts for more.

FSDP2 has two levels of sharding only. Weft's zero=1 and 2 are compared with FSDP2 without resharding after forward;
the table shows the memory of parameters. torch's schedules sum full gradients over all microbatches and reduce the
sum once, as zero=1. Cases which torch's stack cannot run are left out: tied weights across stages, fewer microbatches
than stages, stages cut automatically; and, with tensor parallelism, sharded parameters which are scalars or have
fewer rows than ranks.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, LlamaConfig, PipelinePlan, forward_backward, initialize, parallelize
from weft.models.train.measure import CollectiveCount
from weft.models.train.recipes import recipe

from benchmarks.conftest import Tell
from benchmarks.stages import adamw, torch_step
from benchmarks.timing import Timed
from tests.support.pool import Pool

WARMUP, STEPS, STEPS_OF_RECIPE = 2, 9, 41  # the recipe needs more steps: they are short, and both stacks are close
BATCH, TOKENS, MICROBATCHES = 16, 32, 4
MODEL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=64
)
RECIPE = recipe("llama-tiny")
CASES = [
    pytest.param({"dp": 1}, 0, id="dp1-recipe"),
    pytest.param({"dp": 2}, 0, id="dp2-recipe"),
    pytest.param({"dp": 4}, 0, id="dp4-recipe"),
    pytest.param({"dp": 8}, 1, id="dp8-zero1"),
    pytest.param({"dp": 8}, 2, id="dp8-zero2"),
    pytest.param({"dp": 8}, 3, id="dp8-zero3"),
    pytest.param({"dp": 4, "tp": 2}, 3, id="dp4-tp2-zero3"),
    pytest.param({"pp": 2, "dp": 2, "tp": 2}, 1, id="pp2-dp2-tp2-zero1"),
    pytest.param({"pp": 4, "dp": 2}, 1, id="pp4-dp2-zero1"),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of one stack, measured on one rank."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # of each step after the warmup
    cpu_seconds: tuple[float, ...]  # of each step after the warmup
    collectives: int  # of a step
    received: int  # bytes of a step
    held: int  # bytes of parameters between steps


def measure(axes: dict[str, int], zero: int, steps: int) -> dict[str, Measured]:
    """Runs steps of each stack in turn, and counts the communication of a step. Runs on every rank.

    zero: 0 takes the default recipe's model and batch.
    """
    data = RECIPE.data
    B, T = (BATCH, TOKENS) if zero else (data.batch_size, data.sequence_length)
    config = MODEL if zero else RECIPE.model
    ids = torch.randint(0, config.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    # The view is the embedding's output, reshaped by tensor parallelism; nothing here writes into the view.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    ways = {
        "Weft": _weft(config, axes, zero, tokens, targets),
        "torch": torch_step(
            *(_model(config), mesh, tokens, targets),
            reshard_after_forward=zero == 3 if zero else None,
            microbatches=MICROBATCHES,
        ),
    }
    losses: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARMUP + steps):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            losses[name].append(ways[name][0]())
            seconds[name].append(time.perf_counter() - start)
            spent[name].append(time.process_time() - cpu_start)
    found = {}
    for name, (step, model) in ways.items():
        with CollectiveCount() as count:
            step()
            issued = count.take_each()
        found[name] = Measured(
            losses=tuple(losses[name]),
            seconds=tuple(seconds[name][WARMUP:]),
            cpu_seconds=tuple(spent[name][WARMUP:]),
            collectives=len(issued),
            received=sum(each.nbytes for each in issued),
            held=_held(model),
        )
    return found


def _weft(
    config: LlamaConfig, axes: dict[str, int], zero: int, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[Callable[[], float], nn.Module]:
    model = _model(config)
    pipeline = PipelinePlan(schedule="1f1b", microbatches=MICROBATCHES) if "pp" in axes else None
    parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), zero=zero, pipeline=pipeline))
    optimizer = adamw(model)

    def step() -> float:
        loss = forward_backward(model, cross_entropy, tokens, targets)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, model


def _model(config: LlamaConfig) -> Llama:
    model = Llama(config)
    initialize(model, seed=0)
    return model


def _held(model: nn.Module) -> int:
    with torch.no_grad():
        locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in locals_}
    return sum(storages.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("axes", "zero"), CASES)
def test_a_step_beside_torchs_stack(axes: dict[str, int], zero: int, pool: Pool, tell: Tell) -> None:
    steps, size = STEPS if zero else STEPS_OF_RECIPE, ProcessMesh.grid(**axes).size
    ranks = tell.measuring(pool.run, measure, axes, zero, steps, ranks=size, timeout=840)
    model = "a small Llama" if zero else "the default recipe"
    case = f"a step of {model}, {' x '.join(f'{axis}={size}' for axis, size in axes.items())}, zero={zero}"
    check(ranks)
    # A step takes as long as the slowest rank, and costs the CPU time of all ranks.
    seconds = {name: [max(each) for each in zip(*(r[name].seconds for r in ranks), strict=True)] for name in ranks[0]}
    spent = {name: [sum(each) for each in zip(*(r[name].cpu_seconds for r in ranks), strict=True)] for name in ranks[0]}
    print(f"\n{case}: {_ratio(seconds)} of torch's time, {_ratio(spent)} of its processors' time")
    for name, way in ranks[0].items():
        print(
            f"{name:8}{statistics.median(seconds[name]) * 1e3:9.1f} ms{way.collectives:5} collectives"
            f"{way.received:9} bytes received{way.held:9} bytes of parameters"
        )
        counted = {"collectives": way.collectives, "received_bytes": way.received, "parameter_bytes": way.held}
        figures = Timed(tuple(seconds[name])).figures | {"cpu_seconds_median": statistics.median(spent[name])}
        tell(case, name, "host_time", **figures | counted)


def _ratio(times: dict[str, list[float]]) -> str:
    """Weft's time divided by torch's, step by step: the median (20th percentile - 80th percentile)."""
    ratios = [a / b for a, b in zip(times["Weft"], times["torch"], strict=True)]
    low, *_, high = statistics.quantiles(ratios, n=5)
    return f"{statistics.median(ratios):.2f} ({low:.2f} - {high:.2f})"


def check(ranks: list[dict[str, Measured]]) -> None:
    """Asserts that both stacks compute the same losses on every rank, and that the losses fall."""
    truth = ranks[0]["torch"].losses
    assert truth[-1] < truth[0], "the steps train"
    for rank in ranks:
        for way in rank.values():
            assert way.losses[0] == pytest.approx(truth[0], rel=1e-6)
            assert way.losses == pytest.approx(truth, rel=1e-4)  # rounding differences grow
