"""The price of `exact`: the time of a step of a small Llama with `exact`, over the time of the step without `exact`.

In llama-tiny, of width 128, the host's part of each op is large. `WIDER` has width 512.

On the named mesh itself, each process computes its own shards, and the order of sums alone differs. With tp, steps
with `exact` divide the tokens over the tp axis, as `--plan.sequence` does. There the step with `sequence` is timed,
too. A process standing for a mesh of eight computes eight shards in each op, in turn, and is compared with the ordinary
step of one process.
Steps with and without `exact` alternate, and the median counts. Times are the CPU time of all processes: load on the
machine changes CPU time less than wall-clock time. Python calls of a step, the host's overhead, are counted, too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Llama, forward_backward, initialize, parallelize
from weft.models.step.find_gradients import clip_gradients
from weft.models.train.measure import CollectiveCount
from weft.models.train.recipes import recipe
from weft.reshard import exact_sums

from benchmarks.conftest import Tell
from benchmarks.stages import adamw
from benchmarks.timing import Timed
from tests.support.pool import Pool

WARMUP, STEPS = 3, 21
ON_ITSELF, ON_ONE_PROCESS = 1.10, 1.6  # goals: times the ordinary step's CPU time
TINY = recipe("llama-tiny")
WIDER = replace(
    TINY,
    model=replace(TINY.model, hidden_size=512, intermediate_size=1536, num_layers=2),
    data=replace(TINY.data, batch_size=8, sequence_length=256),
)
RECIPES = {"llama-tiny": TINY, "width 512": WIDER}
MESHES = [
    pytest.param({"dp": 2, "tp": 1}, {"dp": 2, "tp": 1}, ON_ITSELF, id="dp2-itself"),
    pytest.param({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, ON_ITSELF, id="dp2-tp2-itself"),
    pytest.param({"dp": 8}, {"dp": 1}, ON_ONE_PROCESS, id="dp8-on-one"),
    pytest.param({"dp": 4, "tp": 2}, {"dp": 1, "tp": 1}, ON_ONE_PROCESS, id="dp4-tp2-on-one"),
]
Ways = dict[str, Callable[[], float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of one way on one rank."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # CPU time of each step after the warmup
    calls: int  # of Python functions in a step
    received: int  # bytes of a step


def measure(recipe_name: str, named: dict[str, int], axes: dict[str, int], steps: int) -> dict[str, Measured]:
    """Runs steps of a model of `RECIPES` without and with `exact` in turn. Runs on every rank."""
    ways: Ways = {"ordinary": _way(recipe_name, axes, None), "exact": _way(recipe_name, axes, named)}
    if axes.get("tp", 1) > 1:
        ways["sequence"] = _way(recipe_name, axes, None, sequence=True)
    losses: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARMUP + steps):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            dist.barrier()
            start = time.process_time()
            losses[name].append(ways[name]())
            seconds[name].append(time.process_time() - start)
    found = {}
    for name, step in ways.items():
        with CollectiveCount() as count:
            step()
        received = sum(each.nbytes for each in count.take_each())
        found[name] = Measured(tuple(losses[name]), tuple(seconds[name][WARMUP:]), _calls(step), received)
    return found


def _way(
    recipe_name: str, axes: dict[str, int], named: dict[str, int] | None, *, sequence: bool = False
) -> Callable[[], float]:
    recipe = RECIPES[recipe_name]
    model: Any = Llama(recipe.model)
    initialize(model, seed=0)
    if named is not None or ProcessMesh.grid(**axes).size > 1:
        # The ordinary mesh leaves out axes of size 1, as `weft train` does.
        mesh = ProcessMesh.grid(**{axis: size for axis, size in axes.items() if size > 1 or named is not None})
        parallelize(model, mesh, replace(model.parallel_plan(), exact=named, sequence=sequence))
    optimizer = adamw(model)
    B, T = recipe.data.batch_size, recipe.data.sequence_length
    ids = torch.randint(0, recipe.model.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        loss = forward_backward(model, cross_entropy, tokens, targets)
        clip_gradients(model, recipe.optimizer.clip_norm)
        with exact_sums(named):
            optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _calls(step: Callable[[], float]) -> int:
    """Python functions that a step calls on this thread, and those of C."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("named", "axes", "goal"), MESHES)
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_the_price_of_exact(
    recipe_name: str, named: dict[str, int], axes: dict[str, int], goal: float, pool: Pool, tell: Tell
) -> None:
    size = ProcessMesh.grid(**axes).size
    ranks = tell.measuring(pool.run, measure, recipe_name, named, axes, STEPS, ranks=size, timeout=840)
    for rank in ranks:
        ordinary, exact = rank["ordinary"].losses, rank["exact"].losses
        assert exact[-1] < exact[0], "the steps train"
        assert exact[0] == pytest.approx(ordinary[0], rel=1e-6)
        assert exact == pytest.approx(ordinary, rel=1e-3)  # rounding differences grow
        assert exact == ranks[0]["exact"].losses
    spent = {name: [sum(each) for each in zip(*(r[name].seconds for r in ranks), strict=True)] for name in ranks[0]}
    medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
    calls = {name: each.calls for name, each in ranks[0].items()}
    text = ", ".join(f"{axis}={count}" for axis, count in named.items())
    where = f"{size} process{'es' if size > 1 else ''}"
    for other in (name for name in spent if name != "exact"):
        pairs = zip(spent["exact"], spent[other], strict=True)
        low, *_, high = statistics.quantiles((a / b for a, b in pairs), n=5)
        print(
            f"\n{recipe_name}, exact {text} on {where}: {medians['exact'] / medians[other]:.2f} of the {other} step's "
            f"CPU time ({low:.2f} - {high:.2f}), goal {goal:.2f}; "
            f"{medians[other] * 1e3:.1f} ms -> {medians['exact'] * 1e3:.1f} ms, "
            f"calls {calls[other]} -> {calls['exact']}, "
            f"bytes {ranks[0][other].received} -> {ranks[0]['exact'].received}"
        )
    case = f"a step of {recipe_name} with exact {text} on {where}"
    for name, seconds in spent.items():
        tell(case, "Weft" if name == "exact" else f"Weft, {name}", "host_time", **Timed(tuple(seconds)).figures)
    tell(f"{case}, counted", "Weft", "count", calls_ratio=calls["exact"] / calls["ordinary"])
