"""The plans near a plan: each with a single decision changed, for as many processes.

`neighbors` may shorten the step, `for_memory` lower the memory, and `single_changes` are all. Asked by `advise` for
changes of a run's plan, and by `local_search` for its next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations

from ..schedules.schedule import ScheduleName
from .plans import CONTEXTS, RECOMPUTES, ZEROS, Candidate

SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 1), ("interleaved", 2))  # to try, with stages on a rank


def neighbors(candidate: Candidate, parts: Mapping[str, float]) -> list[Candidate]:
    """Plans with a decision changed that may shorten a part of the step, for as many processes; longest parts first.

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
    return sorted(found, key=lambda each: -found[each])


def single_changes(candidate: Candidate) -> Iterator[Candidate]:
    """Every plan with a single decision changed: sizes by a factor of 2, an option by any value. Some cannot run."""
    for source, target in permutations(("pp", "dp", "cp", "tp"), 2):
        yield _moved(candidate, source, target)
    yield _with_experts(candidate, candidate.ep * 2)
    if candidate.ep > 1:
        yield _with_experts(candidate, candidate.ep // 2)
        yield replace(candidate, over_tp=not candidate.over_tp)
    yield replace(candidate, microbatches=candidate.microbatches * 2)
    if candidate.microbatches % 2 == 0:
        yield replace(candidate, microbatches=candidate.microbatches // 2)
    yield replace(candidate, sequence=not candidate.sequence)
    yield from (replace(candidate, zero=zero) for zero in ZEROS)
    yield from (replace(candidate, recompute=recompute) for recompute in RECOMPUTES)
    if candidate.cp > 1:
        yield from (replace(candidate, context=context) for context in CONTEXTS)
    if candidate.pp > 1:
        yield from (replace(candidate, schedule=schedule, chunks=chunks) for schedule, chunks in SCHEDULES)


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

    Options are adapted to axes of size 1 and to new axes, and "ep" to the ranks left for experts.
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
    return _with_experts(changed, math.gcd(changed.ep, changed.data_ranks * (changed.tp if changed.over_tp else 1)))


def _with_experts(candidate: Candidate, ep: int) -> Candidate:
    return replace(candidate, ep=ep, over_tp=candidate.over_tp and ep > 1 and candidate.tp > 1)
