"""What lower bounds need to know about each pipeline schedule, in one table: a schedule without a row is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..schedules.schedule import ScheduleName


class ScheduleBounds(NamedTuple):
    """The facts of a schedule by which a plan's seconds and bytes are bounded."""

    splits_backward: bool  # as `Schedule.splits_backward`
    # The most microbatches whose activations rank 0 holds at once, as a mean over the rank's stages. Called with the
    # schedule's ranks, microbatches and chunks.
    in_flight: Callable[[int, int, int], float]


def bounds_of(name: ScheduleName) -> ScheduleBounds:
    """The row of a schedule. Raises ValueError for a schedule without a row."""
    if name not in SCHEDULE_BOUNDS:
        raise ValueError(
            f"the schedule {name!r} has no lower bounds of seconds and memory, so no search compares plans with this "
            f"schedule; add a row to SCHEDULE_BOUNDS in predict/schedule_bounds.py: whether the schedule splits the "
            f"backward, and how many microbatches rank 0 holds; rows are there for {', '.join(SCHEDULE_BOUNDS)}"
        )
    return SCHEDULE_BOUNDS[name]


def _all_at_once(ranks: int, microbatches: int, chunks: int) -> float:
    return float(microbatches)


def _one_for_each_rank(ranks: int, microbatches: int, chunks: int) -> float:
    return float(min(microbatches, ranks))


def _interleaved(ranks: int, microbatches: int, chunks: int) -> float:
    size = microbatches // max(1, microbatches // ranks)  # of a round
    return min(microbatches * chunks, (chunks - 1) * size + 2 * (ranks - 1) + 1) / chunks


SCHEDULE_BOUNDS: dict[ScheduleName, ScheduleBounds] = {
    "gpipe": ScheduleBounds(splits_backward=False, in_flight=_all_at_once),
    "1f1b": ScheduleBounds(splits_backward=False, in_flight=_one_for_each_rank),
    "interleaved": ScheduleBounds(splits_backward=False, in_flight=_interleaved),
    "zero_bubble": ScheduleBounds(splits_backward=True, in_flight=_one_for_each_rank),
}
