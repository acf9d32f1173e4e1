"""Branch and bound over plans: the fastest by the model's price, proved by bounds instead of sampled.

`search` knows nothing of models and chips: its arguments are candidates, lower bounds on a candidate's seconds, cheap
bounds first, and a price. `Certificate` counts the refused, cut, priced and remaining candidates.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    """What a search needs of a candidate."""

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders candidates of equal seconds, simpler first; different for different candidates."""


C = TypeVar("C", bound=Ordered)


@dataclass(frozen=True, slots=True)
class Bound(Generic[C]):
    """A lower bound on a candidate's seconds, never above its price; math.inf for a candidate that does not fit."""

    name: str  # in the certificate: what the bound counts
    seconds: Callable[[C], float]
    is_eager: bool = False  # cheap: found for every candidate before anything is priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[C]):
    """A priced candidate."""

    candidate: C
    seconds: float
    price: Any  # as the price function returned it

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """The order of results: by seconds, the simpler of two equal ones first."""
        return self.seconds, self.candidate.complexity


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What became of every candidate of a search. The counts add up to `enumerated`.

    A search that is `complete` has proved its results: each candidate that was not priced has a lower bound above the
    last result's seconds.
    """

    enumerated: int
    refused: Mapping[str, int] = field(default_factory=dict)  # by reason
    cut: Mapping[str, int] = field(default_factory=dict)  # by the name of the bound
    priced: int = 0
    too_large: int = 0  # of those priced: fast enough for the results, and over the memory
    left: int = 0  # neither priced nor cut when the time was over
    # The least bound among those left: none of them takes less. math.inf with none left.
    least_left: float = math.inf
    seconds: float = 0.0  # that the search took

    @property
    def is_complete(self) -> bool:
        return self.left == 0

    def gap(self, best: float) -> float:
        """The share by which a candidate left unpriced may be faster than `best` seconds; 0 for a complete search."""
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
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[C]:
    """The `keep` candidates with the least seconds, in order; of candidates with equal seconds the simpler first.

    bounds: cheap bounds first, the eager bounds before all further bounds. A candidate's bound is the largest bound
        found, so a later bound need not be above an earlier bound.
    price: a candidate's seconds, math.inf if it does not fit, and any value to keep with it.
    fits: whether a candidate fits the memory, for a test too slow for a bound: called for priced candidates among the
        results.
    within: seconds after which no further candidate is priced. The certificate counts the candidates left.
    refused: candidates known to be impossible, by reason, for the certificate.
    Best first: the candidate with the least bound gets the next bound, or after the last bound a price. The search ends
    when the least bound is above the last result's seconds. Bounds never above the price give the results of pricing
    every candidate.
    """
    eager = [bound for bound in bounds if bound.is_eager]
    if list(bounds[: len(eager)]) != eager:
        raise ValueError("search: a bound that is eager follows one that is not; give the eager ones first")
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
