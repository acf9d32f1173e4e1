"""`search`: branch and bound over candidates. Lower bounds prove the cheapest candidates; few candidates are priced.

The search knows no models and no chips: the caller gives candidates, lower bounds of a candidate's seconds, and a
price. `Certificate` counts the refused, cut, priced and remaining candidates.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar


class _HasComplexity(Protocol):
    """The interface of a candidate, for the order of results."""

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders candidates of equal seconds, simpler first. No two candidates have the same complexity."""


C = TypeVar("C", bound=_HasComplexity)
AHEAD = 8  # candidates whose runs may be made while a candidate's runs are


def _no_runs(candidate: Any) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, slots=True)
class Bound(Generic[C]):
    """A lower bound of a candidate's seconds: never above the price. math.inf for a candidate that cannot fit."""

    name: str  # key of `Certificate.cut`: the resource of the bound, "time" or a kind of memory
    seconds: Callable[[C], float]
    is_eager: bool = False  # cheap: computed for every candidate before the first price
    runs: Callable[[C], Sequence[Any]] = _no_runs  # what `seconds` needs, for `prepare` of `search`


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[C]):
    """A priced candidate."""

    candidate: C
    seconds: float
    price: Any  # the second value of the price function

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """The order of results: fewest seconds first, at equal seconds the simplest first."""
        return self.seconds, self.candidate.complexity


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How many candidates a search refused, cut, priced and left. These four add up to `enumerated`.

    A complete search has proved the results: each unpriced candidate has a lower bound above the last result's seconds.
    """

    enumerated: int  # all candidates
    refused: Mapping[str, int] = field(default_factory=dict)  # impossible candidates, by reason
    # By the name of the bound, which is math.inf or above the last result's seconds.
    cut: Mapping[str, int] = field(default_factory=dict)
    priced: int = 0
    too_large: int = 0  # among the priced: fast enough for the results, but over the memory
    left: int = 0  # neither priced nor cut when the time was over
    least_left: float = math.inf  # least bound of the candidates left, in seconds; math.inf with none left
    seconds: float = 0.0  # duration of the search

    @property
    def is_complete(self) -> bool:
        return self.left == 0

    def gap(self, best: float) -> float:
        """The most by which a candidate left may be faster than `best` seconds, as a share of `best`; 0 with none."""
        return max(0.0, 1 - self.least_left / best) if self.left else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[C]):
    """The result of `search`."""

    found: tuple[Found[C], ...]  # the best, in order
    certificate: Certificate


def search(
    candidates: Iterable[C],
    bounds: Sequence[Bound[C]],
    price: Callable[[C], tuple[float, Any]],
    *,
    fits: Callable[[C], bool] | None = None,
    keep: int = 10,
    within: float = math.inf,
    refused: Mapping[str, int] | None = None,
    price_runs: Callable[[C], Sequence[Any]] = _no_runs,
    fit_runs: Callable[[C], Sequence[Any]] = _no_runs,
    prepare: Callable[[Sequence[Any], Iterable[Sequence[Any]]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[C]:
    """Find the `keep` candidates with the fewest seconds, in order; at equal seconds the simplest first.

    bounds: eager bounds first, then from cheap to costly. A candidate's bound is the largest found until then, so a
        later bound may be below an earlier bound.
    price: returns a candidate's seconds, math.inf for a candidate that cannot run, and a value for `Found.price`.
    fits: whether a candidate fits the memory: a test too slow for a bound. Called for priced candidates that would be
        among the results. None: all candidates fit.
    within: seconds after which no further candidate is priced. The certificate counts the candidates left.
    price_runs, fit_runs: what `price` and `fits` need, as `Bound.runs`.
    prepare: makes what a bound that is not eager, a price or `fits` needs before the call, where anything is needed.
        Called as (needed, ahead): `ahead` lists what is likely to be needed next. Results do not depend on `prepare`.
    refused: numbers of impossible candidates by reason, for the certificate. None: no candidate was refused.
    Best first: the candidate with the least bound gets the next bound, or after the last bound a price. The search ends
    when the least bound is above the last result's seconds. Then the results are those of pricing every candidate.
    Raises ValueError for an eager bound after a bound that is not.
    """
    eager = [bound for bound in bounds if bound.is_eager]
    if list(bounds[: len(eager)]) != eager:
        raise ValueError("search: an eager bound comes after a bound that is not eager; give the eager bounds first")
    begin = clock()
    cut: Counter[str] = Counter()
    queue: list[tuple[float, tuple[int, ...], int, str, C]] = []
    for candidate in candidates:
        least, name = 0.0, ""
        for bound in eager:
            seconds = bound.seconds(candidate)
            if seconds > least:
                least, name = seconds, bound.name
            if least == math.inf:
                break
        if least == math.inf:
            cut[name] += 1
        else:
            queue.append((least, candidate.complexity, len(eager), name, candidate))
    total = sum(cut.values()) + len(queue)
    heapq.heapify(queue)
    runs_of_stages = [*(bound.runs for bound in bounds), price_runs, fit_runs]

    def ahead(stage: int, candidate: C) -> Iterator[Sequence[Any]]:
        if stage < len(bounds):  # of priced candidates, few are tried for memory
            yield runs_of_stages[stage + 1](candidate)
        yield from (runs_of_stages[each[2]](each[4]) for each in heapq.nsmallest(AHEAD, queue))

    def make_ready(stage: int, candidate: C) -> None:
        if prepare is not None and (needed := runs_of_stages[stage](candidate)):
            prepare(needed, ahead(stage, candidate))

    found: list[Found[C]] = []
    num_priced, too_large, left, least_left = 0, 0, 0, math.inf
    while queue:
        worst = found[keep - 1].seconds if len(found) >= keep else math.inf
        if queue[0][0] > worst:
            cut.update(name for _, _, _, name, _ in queue)
            break
        if clock() - begin > within:
            still_open = [entry for entry in queue if entry[0] <= worst]
            cut.update(name for least, _, _, name, _ in queue if least > worst)
            left, least_left = len(still_open), queue[0][0]
            break
        least, complexity, stage, name, candidate = heapq.heappop(queue)
        make_ready(stage, candidate)
        if stage < len(bounds):
            seconds = bounds[stage].seconds(candidate)
            if seconds > least:
                least, name = seconds, bounds[stage].name
            if least == math.inf:
                cut[name] += 1
            else:
                heapq.heappush(queue, (least, complexity, stage + 1, name, candidate))
            continue
        num_priced += 1
        seconds, value = price(candidate)
        entry = Found(candidate=candidate, seconds=seconds, price=value)
        if seconds == math.inf or (len(found) >= keep and entry.rank > found[keep - 1].rank):
            continue
        make_ready(stage + 1, candidate)
        if fits is not None and not fits(candidate):
            too_large += 1
            continue
        insort(found, entry, key=lambda each: each.rank)
        del found[keep:]
    certificate = Certificate(
        enumerated=total + sum((refused or {}).values()),
        refused=dict(refused or {}),
        cut=dict(cut),
        priced=num_priced,
        too_large=too_large,
        left=left,
        least_left=least_left,
        seconds=clock() - begin,
    )
    return Outcome(found=tuple(found), certificate=certificate)
