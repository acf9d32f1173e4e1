"""`advise`: finds single changes of a run's plan with a shorter step. Changed plans are priced like the plan.

A lower bound of a change's seconds, or a memory above the limit, spares the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from ..schedules.schedule import ScheduleName
from .forks import Forks
from .plan_prices import PlanPrices
from .plan_runs import PlanRuns
from .plans import RECOMPUTES, ZEROS, Candidate

MOST = 5  # plans returned
TRIED = 8  # plans tried; a price costs a run on shapes
SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 1), ("interleaved", 2))  # to try, with stages on a rank
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
        try:
            return prices.fits(change)
        except ValueError:  # refused by the model
            return False

    changes = list(filter(is_allowed, neighbors(candidate, parts) if fits else for_memory(candidate)))
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
        priced.append((compiled.price(candidate)[0], candidate))  # stands for the same plan with compiled blocks
    faster = sorted((each for each in priced if each[0] <= most), key=lambda each: (each[0], each[1].complexity))
    faster = [each for each in faster if each[0] < math.inf]
    runs.prepare([run for _, each in faster[:MOST] for run in prices.fit_runs(each)])
    return [
        ChangedPlan(
            candidate=each,
            is_compiled=is_compiled or each == candidate,
            seconds=changed,
            memory_bytes=prices.memory.peak(each),
        )
        for changed, each in islice((found for found in faster if is_within_memory(found[1])), MOST)
    ]


def neighbors(candidate: Candidate, parts: Mapping[str, float]) -> list[Candidate]:
    """Up to `TRIED` plans with a single decision changed, for as many processes; for the longest parts first.

    parts: seconds of the candidate's step, as in `Estimate.parts`.
    """
    found: dict[Candidate, float] = {}
    for part, changes in (
        ("bubble", _for_bubble(candidate)),
        ("communication", _for_communication(candidate)),
        ("products", _for_products(candidate)),
        ("memory_bound", _for_memory_bound(candidate)),
    ):
        for change in changes:
            found.setdefault(change, parts[part])
    return sorted(found, key=lambda each: -found[each])[:TRIED]


def _for_bubble(candidate: Candidate) -> Iterator[Candidate]:
    """Changes against a pipeline's bubble: schedules, more microbatches, fewer stages."""
    if candidate.pp == 1:
        return
    for schedule, chunks in SCHEDULES:
        if (schedule, chunks) != (candidate.schedule, candidate.chunks):
            yield replace(candidate, schedule=schedule, chunks=chunks)
    yield replace(candidate, microbatches=candidate.microbatches * 2)
    yield _moved(candidate, "pp", "dp")


def _for_communication(candidate: Candidate) -> Iterator[Candidate]:
    """Changes toward collectives of fewer bytes, in smaller groups, or over faster links."""
    if candidate.tp > 1:
        yield replace(candidate, sequence=not candidate.sequence)
        yield _moved(candidate, "tp", "dp")
    if candidate.cp > 1:
        yield replace(candidate, context="ulysses" if candidate.context == "all_gather" else "all_gather")
        yield _moved(candidate, "cp", "dp")
    for zero in ZEROS:
        if zero != candidate.zero:
            yield replace(candidate, zero=zero)
    if candidate.dp > 1:
        yield _moved(candidate, "dp", "tp")
    if candidate.microbatches > 1:
        yield replace(candidate, microbatches=candidate.microbatches // 2)


def _for_products(candidate: Candidate) -> Iterator[Candidate]:
    """Changes toward less recomputation, or larger products."""
    for recompute in RECOMPUTES[: RECOMPUTES.index(candidate.recompute)]:
        yield replace(candidate, recompute=recompute)
    if candidate.microbatches > 1:
        yield replace(candidate, microbatches=candidate.microbatches // 2)


def _for_memory_bound(candidate: Candidate) -> Iterator[Candidate]:
    """Changes that divide elementwise work over more ranks, or avoid recomputing it."""
    if candidate.tp > 1 and not candidate.sequence:
        yield replace(candidate, sequence=True)
    yield from _for_products(candidate)


def for_memory(candidate: Candidate) -> list[Candidate]:
    """Plans with a single decision changed to lower a rank's memory."""
    found = [replace(candidate, zero=zero) for zero in ZEROS if zero > candidate.zero]
    found += [replace(candidate, recompute=each) for each in RECOMPUTES[RECOMPUTES.index(candidate.recompute) + 1 :]]
    found.append(replace(candidate, microbatches=candidate.microbatches * 2))
    if candidate.tp > 1 and not candidate.sequence:
        found.append(replace(candidate, sequence=True))
    return [*found, *(_moved(candidate, "dp", axis) for axis in ("tp", "pp", "cp") if candidate.dp > 1)]


def _moved(candidate: Candidate, source: str, target: str) -> Candidate:
    """The candidate with axis `source` halved and axis `target` doubled; unchanged where `source` is odd.

    Options are adapted to axes of size 1 and to new axes.
    """
    sizes = {axis: getattr(candidate, axis) for axis in (source, target)}
    if sizes[source] % 2:
        return candidate
    changed = replace(candidate, **{source: sizes[source] // 2, target: sizes[target] * 2})
    if changed.tp == 1:
        changed = replace(changed, sequence=False)
    if changed.cp == 1:
        changed = replace(changed, context=None)
    elif changed.context is None:
        changed = replace(changed, context="all_gather")
    if changed.pp == 1:
        changed = replace(changed, schedule=None, chunks=1)
    elif changed.schedule is None:
        changed = replace(changed, schedule="1f1b", microbatches=max(changed.microbatches, 2 * changed.pp))
    return changed
