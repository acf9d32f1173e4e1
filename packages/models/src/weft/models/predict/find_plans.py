"""`find_plans`: the fastest plans of a training step on a chip, by prediction, with a certificate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from weft.mesh import ProcessMesh

from ..checks import check_tensor_parallel
from ..experts import Experts
from ..parallel.plan import ParallelPlan
from ..step.alike import block_names
from ..terminal import gib
from .bounds import Parameters
from .chip import Chip, load_chip
from .estimate import Estimate
from .events import Compute
from .forks import Forks
from .local_search import local_search
from .plan_families import accepted_sizes, families_by_memory, families_by_time
from .plan_memory import PlanMemory, least_tp
from .plan_prices import ACTIVATIONS, WEIGHTS, PlanPrices
from .plan_runs import PlanRuns, unmade
from .plans import Candidate, Space, family_of
from .search import Bound, CandidateFamily, Certificate, search
from .stage_traces import StageTraces, least_two
from .work import count_experts
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan with the prediction of a step. Made by `find_plans`."""

    candidate: Candidate
    mesh: ProcessMesh
    plan: ParallelPlan
    seconds: float  #: of a step
    tokens_per_second: float  #: over all processes
    mfu: float
    memory_bytes: int  #: of the fullest rank, an upper bound
    parts: Mapping[str, float]  #: seconds of a step by part, as in `Estimate.parts`

    def slower_by(self, best: FoundPlan) -> tuple[str, float]:
        """The part with the largest excess over `best`'s, and the excess in seconds."""
        name = max(self.parts, key=lambda part: self.parts[part] - best.parts[part])
        return name, self.parts[name] - best.parts[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlans:
    """The fastest plans in order, with the proof that no plan is faster. Made by `find_plans`."""

    plans: tuple[FoundPlan, ...]
    certificate: Certificate


def find_plans(
    model: nn.Module,
    *,
    processes: int,
    chip: str | Path | Chip,
    batch: tuple[int, int],
    memory: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False,
    keep: int = 10,
    within: float = math.inf,
    workers: int = 1,
    **options: Any,
) -> FoundPlans:
    """The fastest plans to train `model` on `processes` chips, by prediction: no process is started.

    Searches meshes of pp, dp, cp, tp and, for mixtures, ep; zero, sequence, context, schedule, microbatches and
    recompute. Branch and bound: each unpriced plan has a lower bound above the last result's seconds.
    model: not parallel, on any device, with a `parallel_plan` of its own. Unchanged.
    chip: a name, a file of `weft measure`, or a `Chip`. batch: (rows, tokens in a row) of a step over all ranks.
    memory: bytes for a rank; None for the chip's.
    dtype: of the layers' computation, by autocast. compiled: whether blocks are compiled.
    keep: the number of results. within: seconds after which the search ends; see `within` of `search`.
    workers: processes forked from this one, which run steps on shapes; 1: none. Results do not depend on workers. Fork
        no program with threads of its own.
    options: further fields of `Workload`: criterion, inputs, clip_norm, reduce_dtype, states, update.
    Communication: none.
    Raises ValueError for an unknown chip, for processes or a batch below 1, where no plan can run, and where no plan
    fits the memory, with the least memory of any plan.
    """
    rows, tokens = batch
    space = Space(processes=processes, rows=rows, num_experts=count_experts(model))
    workload = Workload(
        model=model, rows=rows, tokens=tokens, dtype=dtype, is_compiled=compiled, **{"clip_norm": 1.0, **options}
    )
    found_chip = chip if isinstance(chip, Chip) else load_chip(chip)
    num_blocks = len(block_names(model, workload.plan_of(Candidate())))

    def check(candidate: Candidate) -> None:
        check_stages(candidate, num_blocks)
        if hasattr(getattr(model, "config", None), "parallel_sizes"):
            check_tensor_parallel(model.config, candidate.tp)  # type: ignore[arg-type]

    return search_plans(
        *(workload, space, found_chip),
        check=check, memory=memory, keep=keep, within=within, workers=workers,
    )  # fmt: skip


def search_plans(
    workload: Workload,
    space: Space,
    chip: Chip,
    *,
    check: Callable[[Candidate], None],
    memory: int | None = None,
    flops: float | None = None,
    keep: int = 10,
    within: float = math.inf,
    workers: int = 1,
) -> FoundPlans:
    """Find the fastest plans of a space. Called by `find_plans` and by the command `weft plan`.

    memory: bytes for a rank; None: the chip's. check: as for `check_members`. flops: of the model in a step,
        without recomputation; None: as traced.
    Further arguments and errors: as for `find_plans`.
    """
    limit = chip.memory_bytes if memory is None else memory
    parameters = parameters_of(workload)
    states = parameters.total + parameters.trained * (1 + parameters.states)
    if states / space.processes > limit:
        raise ValueError(
            f"weights, gradients and optimizer states take {gib(states)}, {gib(states / space.processes)} for each "
            f"of {space.processes:,} processes at least, and {gib(limit)} are given; give more memory, or "
            f"{math.ceil(states / limit):,} processes or more"
        )
    tp, cp = accepted_sizes(space, check)
    plan_memory = PlanMemory(workload=workload, parameters=parameters, run_tps=least_tp(tp))
    stages = StageTraces(workload=workload, tp=least_two(tp), cp=least_two(cp), num_experts=space.num_experts)
    with Forks(workload.run, stages.run, plan_memory.run, plan_memory.run_forward, count=workers) as forks:
        runs = PlanRuns(forks)
        if flops is None:
            runs.prepare(unmade([(workload.runs, *workload.run_for(Candidate()))]))
        prices = PlanPrices(
            workload=workload,
            chip=chip,
            processes=space.processes,
            limit=limit,
            flops=traced_flops(workload) if flops is None else flops,
            memory=plan_memory,
            stages=stages,
        )
        runs.prepare(prices.even_runs(space.recomputes))

        def suggest(is_over: Callable[[], bool]) -> Iterator[tuple[Candidate, Candidate]]:
            for each in local_search(space, check, prices, runs, is_over):
                yield family_of(each), each

        outcome = search(
            *(families_by_time(space, check, prices), prices.bounds(), prices.price),
            fits=prices.fits, keep=keep, within=within,
            price_runs=prices.price_runs, fit_runs=prices.fit_runs, prepare=runs.prepare, suggest=suggest,
        )  # fmt: skip
        proof = outcome.certificate
        if not proof.priced and proof.is_complete and not proof.cut:
            reasons = ", ".join(f"{count:,} as {reason}" for reason, count in Counter(proof.refused).most_common(3))
            reasons = reasons or f"the fixed options fit no mesh of {space.processes:,} processes"
            raise ValueError(f"none of {proof.enumerated:,} plans can run: {reasons}")
        if not outcome.found and proof.is_complete:
            count = proof.enumerated - sum(proof.refused.values())
            families = families_by_memory(space, check, prices)
            raise ValueError(_nothing_fits(prices, families, count, states, within, runs))
    plans = tuple(
        _found_plan(workload, each.candidate, each.price, plan_memory.peak(each.candidate)) for each in outcome.found
    )
    return FoundPlans(plans=plans, certificate=outcome.certificate)


def traced_flops(workload: Workload) -> float:
    """Operations of the model's products and attention in a step, counted in the trace of a single rank."""
    trace = workload.trace(Candidate())
    return float(
        sum(
            event.flops * trace.count(segment)
            for segment in trace.segments
            for event in segment.events
            if isinstance(event, Compute)
        )
    )


def check_stages(candidate: Candidate, num_blocks: int) -> None:
    """Raise ValueError for sizes unfit for the schedule, and for more stages than blocks."""
    if candidate.pipeline is not None and candidate.pipeline.count_stages(candidate.pp) > num_blocks:
        raise ValueError(f"the model has {num_blocks} blocks, which cannot be cut into more stages")


def parameters_of(workload: Workload) -> Parameters:
    """The bytes of the parameters of a workload's model, for `PlanMemory`."""
    model, states = workload.model, workload.states
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    trained = {name: sizes[name] for name, each in model.named_parameters() if each.requires_grad}
    experts = {each for module in model.modules() if isinstance(module, Experts) for each in module.parameters()}
    state_bytes = sum(
        (states if isinstance(states, int) else states[name]) * nbytes for name, nbytes in trained.items()
    )
    blocks = block_names(model, workload.plan_of(Candidate()))

    def in_blocks(chosen: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sum(nbytes for name, nbytes in chosen.items() if name.startswith(f"{block}.")) for block in blocks)

    of_experts = {name: sizes[name] for name, each in model.named_parameters() if each in experts}
    return Parameters(
        total=sum(sizes.values()),
        in_blocks=in_blocks(sizes),
        experts_in_blocks=in_blocks(of_experts),
        trained=sum(trained.values()),
        experts=sum(of_experts.values()),
        itemsize=max(each.element_size() for each in model.parameters()),
        states=state_bytes / max(1, sum(trained.values())),
    )


def _found_plan(workload: Workload, candidate: Candidate, found: Estimate, nbytes: int) -> FoundPlan:
    return FoundPlan(
        candidate=candidate,
        mesh=ProcessMesh.grid(**candidate.axes),
        plan=workload.plan_of(candidate),
        seconds=found.seconds,
        tokens_per_second=found.tokens_per_second,
        mfu=found.mfu,
        memory_bytes=nbytes,
        parts={str(part): seconds for part, seconds in found.parts.items()},
    )


def _nothing_fits(
    prices: PlanPrices,
    families: Iterable[CandidateFamily[Candidate]],
    count: int,
    states: float,
    within: float,
    runs: PlanRuns,
) -> str:
    """The error message of a search without results. Searches for the plan with the least memory, to name this plan.

    families: of `families_by_memory`. count: of plans that are not refused.
    """
    memory, limit = prices.memory, prices.limit
    bounds = [
        Bound(WEIGHTS, memory.weights_floor, is_eager=True),
        Bound(ACTIVATIONS, memory.floor, runs=prices.floor_runs),
    ]
    least = search(
        *(families, bounds, lambda each: (float(memory.peak(each)), None)),
        keep=1, within=within, price_runs=prices.peak_runs, prepare=runs.prepare,
    ).found  # fmt: skip
    takes = f"the least that one takes is {gib(least[0].seconds)}, with {least[0].candidate}; " if least else ""
    return (
        f"none of {count:,} plans fits {gib(limit)} of memory; {takes}give that much memory, fewer tokens, "
        f"or more processes (weights, gradients and states alone take {gib(states)} over all)"
    )
