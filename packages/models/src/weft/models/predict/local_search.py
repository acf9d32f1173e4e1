"""`local_search`: finds good plans from the prices of few plans, where the time is too short to prove the best plan.

Starts from a plan for each pair of sizes of "pp" and "tp", and goes on to the first neighbor with fewer seconds. Where
a search by bounds ends early, the plans with the least bounds may have prices far above these bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..checks import divisors
from .estimate import Estimate
from .neighbors import neighbors, single_changes
from .plan_families import Check
from .plan_prices import PlanPrices
from .plan_runs import PlanRun, PlanRuns
from .plans import RECOMPUTES, Candidate, Space, check_members, family_of


def local_search(
    space: Space, check: Check, prices: PlanPrices, runs: PlanRuns, is_over: Callable[[], bool]
) -> list[Candidate]:
    """The priced plans of the space. The fastest of the plans fits the memory.

    Only plans faster than all plans priced before are checked for memory.
    check: raises ValueError for a plan that the model refuses. is_over: whether to end, asked before each price.

    A start recomputes as little as the memory allows, and without stages has as few microbatches. The search climbs at
    once from a start faster than every plan before, and from slower starts at the end.
    """
    search = _LocalSearch(space=space, check=check, prices=prices, runs=runs, is_over=is_over)
    slower = dict[Candidate, float]()  # starts slower than an earlier start, with their seconds
    starts = sorted(search.starts(), key=lambda each: (prices.eager_bound(each), each.complexity))
    for start in starts:
        fitting = search.first_fit(start, ahead=starts)
        if fitting is None:
            continue
        seconds = search.seconds[fitting]
        if seconds == search.best:
            search.climb(fitting)
        else:
            slower[fitting] = seconds
    for start in sorted(slower, key=lambda each: (slower[each], each.complexity)):
        search.climb(start)
    return [each for each, seconds in search.seconds.items() if seconds < math.inf]


@dataclass(slots=True, kw_only=True)
class _LocalSearch:
    space: Space
    check: Check
    prices: PlanPrices
    runs: PlanRuns
    is_over: Callable[[], bool]
    # By plan tried. math.inf: the plan cannot run, is too large, or has a bound above the best plan's seconds.
    seconds: dict[Candidate, float] = field(default_factory=dict)
    best: float = math.inf  # seconds of the fastest plan that fits
    too_large: set[Candidate] = field(default_factory=set)  # the plans found to exceed the memory

    def starts(self) -> Iterator[Candidate]:
        """A plan for each pair of sizes of "pp" and "tp". Unless fixed, "tp" is at most a node.

        Among meshes whose "dp" divides the rows, the plan has the mesh with the least "cp". Experts are divided over at
        most as many ranks as a node has.
        """
        space, node = self.space, self.prices.chip.levels[0].ranks
        chosen = dict[tuple[int, int], Candidate]()
        for mesh in sorted(space.meshes(), key=lambda each: each.cp):
            if space.rows % mesh.dp == 0 and (mesh.tp <= node or "tp" in space.fixed):
                chosen.setdefault((mesh.pp, mesh.tp), mesh)
        for mesh in chosen.values():
            sizes = divisors(math.gcd(mesh.data_ranks, space.num_experts or 1))
            start = replace(
                mesh,
                ep=max(each for each in sizes if each <= node),
                context=space.contexts[0] if mesh.cp > 1 else None,
                schedule="1f1b" if mesh.pp > 1 else None,
                microbatches=space.rows // mesh.dp if mesh.pp > 1 else 1,
                sequence=mesh.tp > 1,
                zero=0 if mesh.data_ranks == 1 else 1 if mesh.pp > 1 else 3,
            )
            start = replace(start, **self.space.fixed)
            if self._is_possible(start) and self.prices.weights_bound(start) < math.inf:
                yield start

    def first_fit(self, start: Candidate, *, ahead: Sequence[Candidate]) -> Candidate | None:
        """The plan to start from: the first that fits, by the microbatches of `_counts` and then by recomputation.

        With full recomputation a plan takes the least memory: if too large still, the next plan has four times the
        microbatches. None where no plan fits, or each takes longer than the best plan. ahead: as for `seconds_of`.
        """
        for count in self._counts(start):
            plans = (replace(start, microbatches=count, recompute=kind) for kind in RECOMPUTES)
            kinds = [each for each in plans if each in self.space]
            least_and_most = dict.fromkeys([*kinds[:1], *kinds[-1:]])  # recomputed
            if all(self._exceeds_memory(each, ahead=[*kinds, *ahead]) for each in least_and_most):
                continue
            return next((each for each in kinds if self.seconds_of(each, ahead=ahead) < math.inf), None)
        return None

    def _exceeds_memory(self, candidate: Candidate, *, ahead: Sequence[Candidate]) -> bool:
        """Prices the plan; returns whether the plan was found to exceed the memory. ahead: as for `seconds_of`."""
        self.seconds_of(candidate, ahead=ahead)
        return candidate in self.too_large

    def _counts(self, start: Candidate) -> Iterator[int]:
        """The numbers of microbatches to try: the start's, then four times as many while ranks have several rows."""
        most, count = self.space.rows // start.dp, start.microbatches
        while count < most and "microbatches" not in self.space.fixed:
            yield count
            count *= 4
        yield max(start.microbatches, min(count, most))

    def climb(self, candidate: Candidate) -> None:
        """Go on to the first neighbor with fewer seconds, until there is none."""
        while not self.is_over():
            _, estimate = self.prices.price(candidate)
            assert isinstance(estimate, Estimate), "a plan with a price"
            parts = {str(part): seconds for part, seconds in estimate.parts.items()}
            near = dict.fromkeys([*neighbors(candidate, parts), *single_changes(candidate)])
            steps = [each for each in near if self._is_possible(each)]
            for number, each in enumerate(steps):
                if self.seconds_of(each, ahead=steps[number + 1 :]) < self.seconds[candidate]:
                    candidate = each
                    break
            else:
                return

    def seconds_of(self, candidate: Candidate, *, ahead: Sequence[Candidate]) -> float:
        """The seconds of a step, as in `seconds`. ahead: plans that are likely to be priced next."""
        if candidate not in self.seconds:
            if self.is_over():
                return math.inf
            self.seconds[candidate] = self._price(candidate, ahead)
        return self.seconds[candidate]

    def _price(self, candidate: Candidate, ahead: Sequence[Candidate]) -> float:
        prices = self.prices
        if not self._may_be_best(candidate):
            return math.inf
        self.runs.prepare(prices.price_runs(candidate), self._runs_of(ahead))
        seconds, _ = prices.price(candidate)
        if seconds < self.best:
            self.runs.prepare(prices.fit_runs(candidate), self._runs_of(ahead))
            if not prices.fits(candidate):
                self.too_large.add(candidate)
                return math.inf
            self.best = seconds
        return seconds

    def _may_be_best(self, candidate: Candidate) -> bool:
        return self.prices.weights_bound(candidate) < math.inf and self.prices.eager_bound(candidate) < self.best

    def _runs_of(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[PlanRun]]:
        unknown = (each for each in candidates if each not in self.seconds and self._may_be_best(each))
        return filter(None, map(self.prices.price_runs, unknown))

    def _is_possible(self, candidate: Candidate) -> bool:
        return candidate in self.space and bool(check_members(self.space, family_of(candidate), self.check)[0])
