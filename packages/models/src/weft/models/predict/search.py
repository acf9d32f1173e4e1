"""`search`: branch and bound over candidates. Lower bounds prove the cheapest candidates; few candidates are priced.

The search knows no models and no chips: the caller gives candidates, lower bounds of a candidate's seconds, and a
price. `Certificate` counts the refused, cut, priced and remaining candidates.
"""

from __future__ import annotations

import heapq
import math
import time
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
# In the queue of a search: the least seconds, complexity, the next stage (a bound, the price, `fits`), the name of the
# bound, the candidate or family, and once priced the price's value. No two entries have the same complexity.
_Entry = tuple[float, tuple[int, ...], int, str, Any, Any]
CLOSER, MEMBERS = -2, -1  # the next stage of a family: `CandidateFamily.closer`, `CandidateFamily.members`
AHEAD = 8  # candidates whose runs on shapes may be made while a candidate's are


def _no_runs(candidate: Any) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, slots=True)
class Bound(Generic[C]):
    """A lower bound of a candidate's seconds: never above the price. math.inf for a candidate that cannot fit."""

    name: str  # key of `Certificate.cut`: the resource of the bound, "time" or a kind of memory
    seconds: Callable[[C], float]
    is_eager: bool = False  # cheap: computed for every candidate before the first price
    runs: Callable[[C], Sequence[Any]] = _no_runs  # what `seconds` needs, for `prepare` of `search`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateFamily(Generic[C]):
    """Candidates with common lower bounds of their seconds. Listed only where these bounds do not cut all off."""

    complexity: tuple[int, ...]  # at most each member's; no two families have the same
    count: int  # of members
    seconds: float  # never above a member's price; math.inf where no member fits
    name: str  # of the bound `seconds`, as for `Bound`
    closer: Bound[Any]  # a closer bound of every member, called with `key`
    key: Any
    # Lists the members: the possible candidates, and the numbers of impossible members by reason.
    members: Callable[[], tuple[Sequence[C], Mapping[str, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[C]):
    """A priced candidate."""

    candidate: C
    seconds: float
    price: Any  # the second value of the price function


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The numbers of candidates refused, cut, priced and left in a search. The four numbers add up to `enumerated`.

    A complete search has proved the results: by a lower bound of the seconds, no unpriced candidate is a result.
    The members of a family that is cut off as a whole are not listed: impossible candidates among them count as cut.
    """

    enumerated: int  # all candidates, members of families included
    refused: Mapping[str, int] = field(default_factory=dict)  # impossible candidates, by reason
    # By the name of the bound, which is math.inf or not below the last result's seconds.
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
    candidates: Iterable[C | CandidateFamily[C]],
    bounds: Sequence[Bound[C]],
    price: Callable[[C], tuple[float, Any]],
    *,
    fits: Callable[[C], bool] | None = None,
    keep: int = 10,
    within: float = math.inf,
    price_runs: Callable[[C], Sequence[Any]] = _no_runs,
    fit_runs: Callable[[C], Sequence[Any]] = _no_runs,
    prepare: Callable[[Sequence[Any], Iterable[Sequence[Any]]], None] | None = None,
    suggest: Callable[[Callable[[], bool]], Iterable[tuple[Any, C]]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[C]:
    """Find the `keep` candidates with the fewest seconds, in order; at equal seconds the simplest first.

    candidates: candidates, and families of candidates, whose members are not listed beside the family.
    bounds: eager bounds first, then from cheap to costly. A candidate's bound is the largest found until then, so a
        later bound may be below an earlier bound.
    price: returns a candidate's seconds and a value for `Found.price`. Of a candidate that cannot run, returns math.inf
        and the reason for `Certificate.refused`.
    fits: whether a candidate fits the memory: a test too slow for a bound. Called for candidates that are no slower
        than the last result, and after `within` for priced candidates. None: all candidates fit.
    within: seconds after which the search ends. If fewer than `keep` candidates are priced, pricing goes on until one
        fits: of the candidates with the most bounds known, the `keep` with the least bounds, and again. The certificate
        counts the candidates left.
    price_runs, fit_runs: what `price` and `fits` need, as `Bound.runs`.
    prepare: makes what a bound that is not eager, a price or `fits` needs before the call, where anything is needed.
        Called as (needed, ahead): `ahead` lists what is likely to be needed next. Results do not depend on `prepare`.
    suggest: finds good candidates without bounds, as pairs of a family's `key` and a candidate. These are priced at
        once. Called once, after a third of `within`, with a function that says whether five sixths are over.

    Best first: the candidate with the least bound gets the next bound, or after the last bound a price. A candidate
    whose price is the least of all prices and bounds left is tried for memory, and is then the next result. So the
    search ends with the last result, and the results are those of pricing every candidate.
    Raises ValueError for an eager bound after a bound that is not.
    """
    eager = [bound for bound in bounds if bound.is_eager]
    if list(bounds[: len(eager)]) != eager:
        raise ValueError("search: an eager bound comes after a bound that is not eager; give the eager bounds first")
    begin = clock()
    cut, refused, total = Counter[str](), Counter[str](), 0

    def entries(candidate: C | CandidateFamily[C]) -> Iterator[_Entry]:
        """The candidate with the eager bounds, or the family; counted in `cut` where it cannot fit."""
        if isinstance(candidate, CandidateFamily):
            if candidate.seconds == math.inf:
                cut[candidate.name] += candidate.count
            else:
                yield candidate.seconds, candidate.complexity, CLOSER, candidate.name, candidate, None
            return
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
            yield least, candidate.complexity, len(eager), name, candidate, None

    queue: list[_Entry] = []
    for candidate in candidates:
        total += candidate.count if isinstance(candidate, CandidateFamily) else 1
        queue += entries(candidate)
    heapq.heapify(queue)
    runs_of_stages = [*(bound.runs for bound in bounds), price_runs, fit_runs]

    def needs(stage: int, candidate: Any) -> Sequence[Any]:
        """The runs for the stage of a candidate or family."""
        if stage < 0:
            return candidate.closer.runs(candidate.key) if stage == CLOSER else ()
        return runs_of_stages[stage](candidate)

    def first_runs(stage: int, candidate: Any) -> Sequence[Any]:
        """The candidate's runs for the next bound that needs runs; after the bounds, for the present stage alone.

        A candidate without all bounds needs no runs for the price: bounds spare most prices.
        """
        if stage < 0 or stage >= len(bounds):
            return needs(stage, candidate)
        stages = runs_of_stages[stage : len(bounds)]
        return next((runs for runs_of in stages if (runs := runs_of(candidate))), ())

    def ahead(stage: int, candidate: Any) -> Iterator[Sequence[Any]]:
        if 0 <= stage < len(bounds) - 1:
            yield first_runs(stage + 1, candidate)
        yield from (first_runs(each[2], each[4]) for each in heapq.nsmallest(AHEAD, queue))

    def make_ready(stage: int, candidate: Any) -> None:
        if prepare is not None and (needed := needs(stage, candidate)):
            prepare(needed, ahead(stage, candidate))

    found: list[Found[C]] = []
    unpriced: list[_Entry] = []  # when the time is over
    num_priced, too_large, is_over = 0, 0, False

    def take_closest() -> list[_Entry]:
        """Takes candidates out of `unpriced`: with the most bounds known, the `keep` with the least bounds."""
        most_known = max((entry[2] for entry in unpriced), default=0)
        closest = heapq.nsmallest(keep, (entry for entry in unpriced if entry[2] == most_known >= 0))
        chosen = {entry[1] for entry in closest}  # no two entries have the same complexity
        unpriced[:] = [entry for entry in unpriced if entry[1] not in chosen]
        return closest

    def list_members(family: CandidateFamily[C]) -> Iterator[_Entry]:
        members, impossible = family.members()
        refused.update(impossible)
        for member in members:
            yield from entries(member)

    def with_price(entry: _Entry) -> Iterator[_Entry]:
        """The entry at the stage after the price; nothing for a candidate that cannot run, counted as refused."""
        nonlocal num_priced
        _, complexity, _, name, candidate, _ = entry
        seconds, value = price(candidate)
        if seconds == math.inf:
            refused[value] += 1
            return
        num_priced += 1
        yield seconds, complexity, len(bounds) + 1, name, candidate, value

    def with_suggestions(suggested: Sequence[tuple[Any, C]]) -> list[_Entry]:
        """The queue with the prices of suggested candidates, whose families are listed."""
        keys, chosen = {key for key, _ in suggested}, {candidate.complexity for _, candidate in suggested}
        listed, priced = list[_Entry](), list[_Entry]()
        for entry in queue:
            listed += list_members(entry[4]) if entry[2] < 0 and entry[4].key in keys else [entry]
        for entry in listed:
            is_new = 0 <= entry[2] <= len(bounds) and entry[1] in chosen
            priced += with_price(entry) if is_new else [entry]
        heapq.heapify(priced)
        return priced

    while len(found) < keep:
        if suggest is not None and clock() - begin > within / 3:
            queue = with_suggestions(list(suggest(lambda: clock() - begin > within * 5 / 6)))
            suggest = None
        if not queue and is_over and not found:
            queue = take_closest()
        if not queue:
            break
        if not is_over and clock() - begin > within:
            is_over = True
            unpriced = [entry for entry in queue if entry[2] <= len(bounds)]
            queue = [entry for entry in queue if entry[2] > len(bounds)]
            if len(found) + len(queue) < keep:
                queue += take_closest()
            heapq.heapify(queue)
            continue
        least, complexity, stage, name, candidate, value = heapq.heappop(queue)
        make_ready(stage, candidate)
        if stage == MEMBERS:
            for entry in list_members(candidate):
                heapq.heappush(queue, entry)
            continue
        if stage == CLOSER:
            seconds = candidate.closer.seconds(candidate.key)
            if seconds > least:
                least, name = seconds, candidate.closer.name
            if least == math.inf:
                cut[name] += candidate.count
                continue
        elif stage < len(bounds):
            seconds = bounds[stage].seconds(candidate)
            if seconds > least:
                least, name = seconds, bounds[stage].name
            if least == math.inf:
                cut[name] += 1
                continue
        elif stage == len(bounds):
            for entry in with_price((least, complexity, stage, name, candidate, value)):
                heapq.heappush(queue, entry)
            continue
        elif fits is None or fits(candidate):
            found.append(Found(candidate=candidate, seconds=least, price=value))
            continue
        else:
            too_large += 1
            continue
        heapq.heappush(queue, (least, complexity, stage + 1, name, candidate, value))
    unpriced += [entry for entry in queue if entry[2] <= len(bounds)]
    worst = found[keep - 1].seconds if len(found) == keep else math.inf
    still_open = [entry for entry in unpriced if is_over and entry[0] <= worst]
    for entry in unpriced:
        if not is_over or entry[0] > worst:
            cut[entry[3]] += _count(entry)
    certificate = Certificate(
        enumerated=total,
        refused=dict(refused),
        cut=dict(cut),
        priced=num_priced,
        too_large=too_large,
        left=sum(map(_count, still_open)),
        least_left=min((entry[0] for entry in still_open), default=math.inf),
        seconds=clock() - begin,
    )
    return Outcome(found=tuple(found), certificate=certificate)


def _count(entry: _Entry) -> int:
    """The number of candidates that an entry of the queue stands for."""
    return entry[4].count if entry[2] < 0 else 1
