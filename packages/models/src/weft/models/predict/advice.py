"""`advise`: the single changes of a plan that shorten a step most, each priced like the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..schedules.schedule import Name
from .plan_prices import PlanPrices
from .plans import RECOMPUTES, ZEROS, Candidate

MOST = 5  # changes shown
TRIED = 8  # changes priced; each costs a run on shapes
SCHEDULES: tuple[tuple[Name, int], ...] = (("1f1b", 1), ("interleaved", 2))
WORTH = 0.005  # share of a step below which a change is not worth its mention


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan that differs from a run's in one decision."""

    candidate: Candidate
    is_compiled: bool
    seconds: float
    memory_bytes: int


def advise(
    prices: PlanPrices,
    candidate: Candidate,
    check: Callable[[Candidate], None],
    *,
    seconds: float,
    parts: Mapping[str, float],
    memory_bytes: int,
) -> list[Change]:
    """The changes with a shorter step within the memory, fastest first, at most `MOST`.

    seconds, parts, memory_bytes: of the candidate. For a candidate beyond the memory: the changes within the memory.
    check: raises ValueError for a candidate that cannot run.
    """
    fits, is_compiled = memory_bytes <= prices.limit, prices.workload.is_compiled
    priced = []
    for change in neighbors(candidate, parts) if fits else for_memory(candidate):
        if change == candidate:
            continue
        try:
            check(change)
        except ValueError:
            continue
        if prices.weights_bound(change) < math.inf:
            priced.append((prices.price(change)[0], change.complexity, change, is_compiled))
    if fits and not is_compiled and prices.chip.threads is None:
        compiled = replace(prices, workload=replace(prices.workload, is_compiled=True))
        priced.append((compiled.price(candidate)[0], candidate.complexity, candidate, True))
    found: list[Change] = []
    for changed, _, change, compiles in sorted(priced, key=lambda each: each[:2]):
        if len(found) == MOST or (fits and changed > seconds * (1 - WORTH)):
            break
        nbytes = memory_bytes if change == candidate else prices.memory.peak(change)
        if nbytes <= prices.limit:
            found.append(Change(candidate=change, is_compiled=compiles, seconds=changed, memory_bytes=nbytes))
    return found


def neighbors(candidate: Candidate, parts: Mapping[str, float]) -> list[Candidate]:
    """Plans of as many processes with one decision changed: first changes for the longest parts of the step.

    parts: seconds of `Estimate.parts`. At most `TRIED`.
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
    """More actions to fill the pipeline, other schedules, and fewer stages."""
    if candidate.pp == 1:
        return
    for schedule, chunks in SCHEDULES:
        if (schedule, chunks) != (candidate.schedule, candidate.chunks):
            yield replace(candidate, schedule=schedule, chunks=chunks)
    yield replace(candidate, microbatches=candidate.microbatches * 2)
    yield _moved(candidate, "pp", "dp")


def _for_communication(candidate: Candidate) -> Iterator[Candidate]:
    """Collectives of fewer bytes, of smaller groups, or over faster links."""
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
    """Less recomputation, or larger products."""
    for recompute in RECOMPUTES[: RECOMPUTES.index(candidate.recompute)]:
        yield replace(candidate, recompute=recompute)
    if candidate.microbatches > 1:
        yield replace(candidate, microbatches=candidate.microbatches // 2)


def _for_memory_bound(candidate: Candidate) -> Iterator[Candidate]:
    """Work on all tokens divided over more ranks, or done once."""
    if candidate.tp > 1 and not candidate.sequence:
        yield replace(candidate, sequence=True)
    yield from _for_products(candidate)


def for_memory(candidate: Candidate) -> list[Candidate]:
    """Changes of one decision that lower the memory of a rank."""
    found = [replace(candidate, zero=zero) for zero in ZEROS if zero > candidate.zero]
    found += [replace(candidate, recompute=each) for each in RECOMPUTES[RECOMPUTES.index(candidate.recompute) + 1 :]]
    found.append(replace(candidate, microbatches=candidate.microbatches * 2))
    if candidate.tp > 1 and not candidate.sequence:
        found.append(replace(candidate, sequence=True))
    return [*found, *(_moved(candidate, "dp", axis) for axis in ("tp", "pp", "cp") if candidate.dp > 1)]


def _moved(candidate: Candidate, source: str, target: str) -> Candidate:
    """The candidate with a factor of 2 moved from one axis to another; the candidate itself for an odd size."""
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
