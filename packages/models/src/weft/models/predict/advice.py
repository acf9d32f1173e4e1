"""`advise`: finds single changes of a run's plan with a shorter step. Changed plans are priced like the plan.

A lower bound of a change's seconds, or a memory above the limit, spares the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from .forks import Forks
from .neighbors import for_memory, neighbors
from .plan_prices import PlanPrices
from .plan_runs import PlanRuns
from .plans import Candidate

MOST = 5  # plans returned
TRIED = 8  # plans tried; a price costs a run on shapes
WORTH = 0.005  # least share of the step to be saved


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPlan:
    """A plan with a single decision changed, with the prediction of a step. Made by `advise`."""

    candidate: Candidate
    is_compiled: bool  # compiling blocks may be the changed decision
    seconds: float  # of a step
    memory_bytes: int  # of the fullest rank


def advise(
    prices: PlanPrices,
    candidate: Candidate,
    check: Callable[[Candidate], None],
    *,
    seconds: float,
    parts: Mapping[str, float],
    memory_bytes: int,
    runs: PlanRuns | None = None,
) -> list[ChangedPlan]:
    """Price changes of the candidate; return up to `MOST` with a shorter step within the memory, fastest first.

    Of a candidate over the memory: the changes within the memory, whatever their seconds.
    seconds, parts, memory_bytes: of the candidate's prediction. check: as for `check_members`.
    runs: makes runs on shapes in several processes; None: they are made here.
    Called by `weft explain --chip`. Communication: none.
    """
    runs = runs or PlanRuns(Forks(count=1))
    fits, is_compiled = memory_bytes <= prices.limit, prices.workload.is_compiled
    most = seconds * (1 - WORTH) if fits else math.inf  # of a change's step

    def is_allowed(change: Candidate) -> bool:
        try:
            check(change)
        except ValueError:
            return False
        return change != candidate and prices.weights_bound(change) < math.inf

    def may_be_faster(change: Candidate) -> bool:
        # With another recompute, a trace for the bound alone costs as much as the price.
        return change.recompute != candidate.recompute or prices.even_bound(change) <= most

    def is_within_memory(change: Candidate) -> bool:
        runs.prepare(prices.fit_runs(change))
        try:
            return prices.fits(change)
        except ValueError:  # refused by the model
            return False

    tried = neighbors(candidate, parts)[:TRIED] if fits else for_memory(candidate)
    changes = list(filter(is_allowed, tried))
    if fits:
        runs.prepare(prices.even_runs([candidate.recompute]))
        changes = list(filter(may_be_faster, changes))
    else:  # the memory leaves out most changes
        runs.prepare([run for each in changes for run in prices.fit_runs(each)])
        changes = list(filter(is_within_memory, changes))
    runs.prepare([run for each in changes for run in prices.price_runs(each)])
    priced = [(prices.price(each)[0], each) for each in changes]
    if fits and not is_compiled and prices.chip.threads is None:
        compiled = replace(prices, workload=replace(prices.workload, is_compiled=True))
        run = prices.workload.run_for(candidate)
        compiled.workload.runs.learn(*run, prices.workload.runs.of(*run))  # compiled or not, a trace is the same
        priced.append((compiled.price(candidate)[0], candidate))  # stands for the same plan with compiled blocks
    faster = sorted((each for each in priced if each[0] <= most), key=lambda each: (each[0], each[1].complexity))
    faster = [each for each in faster if each[0] < math.inf]
    # All runs start at once, so that no process is idle. Where the first plans fit, the last runs are not needed.
    runs.start([run for _, each in faster for run in prices.fit_runs(each)])
    found = (each for each in faster if is_within_memory(each[1]))
    return [
        ChangedPlan(
            candidate=each,
            is_compiled=is_compiled or each == candidate,
            seconds=changed,
            memory_bytes=prices.memory.peak(each),
        )
        for changed, each in islice(found, MOST)
    ]
