"""Runs on shapes for bounds and prices: `KnownRuns` makes each once, and `PlanRuns` has forked processes make runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from .forks import Forks
from .plans import Candidate

T = TypeVar("T")


class KnownRuns(Generic[T]):
    """Makes each run on shapes once, and keeps the result. A run has a candidate and the rows of a microbatch.

    run: called with the candidate and the rows, over all ranks. Raises ValueError for a candidate refused by the model.
    """

    def __init__(self, run: Callable[[Candidate, int], T]) -> None:
        self.run = run
        self._found: dict[tuple[Candidate, int], T | ValueError] = {}

    def knows(self, candidate: Candidate, rows: int) -> bool:
        """Whether the run was made."""
        return (candidate, rows) in self._found

    def learn(self, candidate: Candidate, rows: int, found: T) -> None:
        """Take over the result of a run made elsewhere."""
        self._found[candidate, rows] = found

    def of(self, candidate: Candidate, rows: int) -> T:
        """The result of the run. Raises the run's ValueError each time."""
        key = candidate, rows
        if key not in self._found:
            try:
                self._found[key] = self.run(*key)
            except ValueError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def results(self) -> dict[tuple[Candidate, int], T]:
        """The results of the runs made until now, without refused candidates."""
        return {key: found for key, found in self._found.items() if not isinstance(found, ValueError)}


PlanRun = tuple[KnownRuns[Any], Candidate, int]  # where the result is kept, and the arguments of the run


def unmade(runs: Iterable[PlanRun]) -> list[PlanRun]:
    """The runs that were not made yet, each once."""
    return [
        (known, candidate, rows) for known, candidate, rows in dict.fromkeys(runs) if not known.knows(candidate, rows)
    ]


class PlanRuns:
    """Has runs made by `forks`, whose functions are the `run` of each `KnownRuns`."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def start(self, runs: Iterable[PlanRun]) -> None:
        """Start runs for a later `prepare`."""
        for known, candidate, rows in runs:
            self._forks.start(known.run, candidate, rows)

    def prepare(self, needed: Sequence[PlanRun], ahead: Iterable[Sequence[PlanRun]] = ()) -> None:
        """Make the runs needed now. Idle processes start runs `ahead`, which are likely to be needed later.

        A run that fails is left out: the model refuses the candidate, and raises the error where the run is needed.
        """
        self.start(needed)
        for later in ahead:
            if not self._forks.has_room:
                break
            self.start(later)
        for known, candidate, rows in needed:
            found = self._forks.take(known.run, candidate, rows)
            if found is not None:
                known.learn(candidate, rows, *found)
