"""Families of plans, which differ in sequence, zero and recompute: bounded before the members are listed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..plan_options import Context
from .plan_prices import TIME, WEIGHTS, PlanPrices
from .plans import Candidate, Space, check_members
from .search import Bound, CandidateFamily

Check = Callable[[Candidate], None]  # as for `check_members`


def accepted_sizes(space: Space, check: Check) -> tuple[set[int], set[int]]:
    """The sizes of "tp" and of "cp" that a mesh without further options may have."""
    tp, cp = set[int](), set[int]()
    for mesh in space.meshes():
        context: Context | None = "all_gather" if mesh.cp > 1 else None
        with suppress(ValueError):
            check(Candidate(dp=mesh.pp * mesh.dp, cp=mesh.cp, tp=mesh.tp, context=context))
            tp.add(mesh.tp)
            cp.add(mesh.cp)
    return tp, cp


def families_by_time(space: Space, check: Check, prices: PlanPrices) -> Iterator[CandidateFamily[Candidate]]:
    """The families of a space with lower bounds of the members' seconds."""
    closer = Bound(TIME, prices.experts_bound, runs=prices.experts_runs)
    return _families(space, check, partial(least_seconds, prices), closer)


def families_by_memory(space: Space, check: Check, prices: PlanPrices) -> Iterator[CandidateFamily[Candidate]]:
    """The families of a space with lower bounds of the members' bytes in the place of seconds."""
    bound = partial(least_weights, prices)
    return _families(space, check, lambda each: (bound(each), WEIGHTS), Bound(WEIGHTS, bound))


def least_seconds(prices: PlanPrices, family: Candidate) -> tuple[float, str]:
    """A lower bound of the seconds of a family's members, math.inf where none fits, and the bound's name.

    family: the simplest member, without recomputation: the others compute no less.
    """
    if least_weights(prices, family) > prices.limit:
        return math.inf, WEIGHTS
    return prices.even_bound(family), TIME


def least_weights(prices: PlanPrices, family: Candidate) -> float:
    """A lower bound of the bytes of a family's members, of weights and states: those under zero=3."""
    return prices.memory.weights_floor(replace(family, zero=3))


def _families(
    space: Space, check: Check, bound: Callable[[Candidate], tuple[float, str]], closer: Bound[Candidate]
) -> Iterator[CandidateFamily[Candidate]]:
    """bound: the least seconds of a family's members, and the bound's name."""
    for each in space.families():
        count = space.count_members(each)
        if count:
            seconds, name = bound(each)
            yield CandidateFamily(
                complexity=each.complexity,
                count=count,
                seconds=seconds,
                name=name,
                closer=closer,
                key=each,
                members=partial(check_members, space, each, check),
            )
