"""`PlanRuns`: makes the runs on shapes for bounds and prices ahead of their use, in forked processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .forks import Forks
from .plans import Candidate


class RunSource(Protocol):
    """What makes runs on shapes, and keeps the results: a `Workload`, a `StageTraces` or a `PlanMemory`."""

    def run(self, candidate: Candidate, rows: int) -> Any:
        """Run a step of the candidate on shapes. rows: of a microbatch, over all ranks."""

    def knows(self, candidate: Candidate, rows: int) -> bool:
        """Whether the run with these arguments was made."""

    def learn(self, candidate: Candidate, rows: int, found: Any) -> None:
        """Take over the result of the run with these arguments."""


PlanRun = tuple[RunSource, Candidate, int]  # a source, and the arguments of `RunSource.run`


def unmade(runs: Iterable[PlanRun]) -> list[PlanRun]:
    """The runs that were not made yet, each once."""
    distinct = dict.fromkeys(runs)
    return [(source, candidate, rows) for source, candidate, rows in distinct if not source.knows(candidate, rows)]


class PlanRuns:
    """Has runs made by `forks`, whose functions are the `run` of each source."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def start(self, runs: Iterable[PlanRun]) -> None:
        """Start runs for a later `prepare`."""
        for source, candidate, rows in runs:
            self._forks.start(source.run, candidate, rows)

    def prepare(self, needed: Sequence[PlanRun], ahead: Iterable[Sequence[PlanRun]] = ()) -> None:
        """Make the runs needed now. Idle processes start runs `ahead`, which are likely to be needed later.

        A run that fails is left out: the model refuses the candidate, and raises the error where the run is needed.
        """
        self.start(needed)
        for later in ahead:
            if not self._forks.has_room:
                break
            self.start(later)
        for source, candidate, rows in needed:
            found = self._forks.take(source.run, candidate, rows)
            if found is not None:
                source.learn(candidate, rows, *found)
