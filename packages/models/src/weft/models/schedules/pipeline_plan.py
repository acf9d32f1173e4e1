"""A plan's choices for a pipeline, and the known schedules: GPipe, 1F1B, interleaved 1F1B and zero-bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from ..checks import check_kinds
from .schedule import NAMES, Action, Schedule, ScheduleName


@lru_cache(maxsize=256)
def make_schedule(name: ScheduleName, *, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name` for `ranks` ranks, each with `chunks` stages: stage s is on rank s % ranks.

    gpipe: all forwards, then all backwards (Huang et al. 2019).
    1f1b: a backward after each forward, as soon as there is one, so a rank holds no more activations than there are
        stages from its own to the last (Narayanan et al. 2019, PipeDream-Flush).
    interleaved: 1F1B over several stages on each rank (Narayanan et al. 2021).
    zero_bubble: gradients of weights, for which nothing waits, fill idle time; as much memory as 1F1B (Qi et al.
        2023, ZB-H1).
    There may be fewer microbatches than ranks. Raises ValueError as `_check_schedule`.
    """
    _check_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    order: dict[ScheduleName, Callable[[int, int, int, int], Iterator[Action]]] = {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _interleaved,
        "zero_bubble": _zero_bubble,
    }
    actions = tuple(tuple(order[name](rank, ranks, microbatches, chunks)) for rank in range(ranks))
    stages = tuple(tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks))
    return Schedule(name=name, microbatches=microbatches, stages=stages, actions=actions)


def _check_schedule(name: ScheduleName, *, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Raises ValueError for an unknown name, a number below 1, and numbers that the schedule `name` cannot take.

    The error names the condition. The schedule is not made.
    """
    if name not in NAMES:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(NAMES)}")
    for option, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"schedule {name!r} was given {option}={value}; it must be 1 or more")
    if name == "interleaved":
        if chunks < 2:
            raise ValueError(
                "schedule 'interleaved' has 2 or more stages on a rank, and chunks is 1; raise it, or use '1f1b'"
            )
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            raise ValueError(
                f"schedule 'interleaved' takes microbatches in rounds of equal size, {ranks} or more, and "
                f"{microbatches} cannot be divided into {rounds} rounds over {ranks} ranks; the nearest numbers that "
                f"can: {_nearest_numbers(microbatches, ranks)}"
            )
    elif chunks > 1:
        raise ValueError(
            f"schedule {name!r} has one stage on a rank, and chunks is {chunks}; use 'interleaved' for several"
        )


def _nearest_numbers(microbatches: int, ranks: int) -> str:
    """The three numbers of microbatches nearest to `microbatches` that divide into rounds."""
    candidates = [n for n in range(1, microbatches + 2 * ranks) if n % max(1, n // ranks) == 0]
    return ", ".join(map(str, sorted(sorted(candidates, key=lambda n: abs(n - microbatches))[:3])))


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    for kind in ("F", "B"):
        yield from (Action(kind, rank, microbatch) for microbatch in range(microbatches))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    forwards = [Action("F", rank, microbatch) for microbatch in range(microbatches)]
    backwards = [Action("B", rank, microbatch) for microbatch in range(microbatches)]
    return _alternating(forwards, backwards, warmup=ranks - rank - 1)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    rounds = max(1, microbatches // ranks)
    size = microbatches // rounds
    order = [
        (chunk, first + i) for first in range(0, microbatches, size) for chunk in range(chunks) for i in range(size)
    ]
    forwards = [Action("F", chunk * ranks + rank, microbatch) for chunk, microbatch in order]
    backwards = [Action("B", (chunks - 1 - chunk) * ranks + rank, microbatch) for chunk, microbatch in order]
    return _alternating(forwards, backwards, warmup=(chunks - 1) * size + 2 * (ranks - rank - 1))


def _alternating(forwards: list[Action], backwards: list[Action], warmup: int) -> Iterator[Action]:
    """`warmup` forwards, then a forward and a backward in turns, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def _zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """ZB-H1: 1F1B in which gradients of weights come later, by as many microbatches as there are ranks before this
    rank.

    1F1B leaves the memory of this many activations unused on this rank: the first rank waits longest for its first
    backward, and holds the most activations.
    """
    forwards = iter([Action("F", rank, microbatch) for microbatch in range(microbatches)])
    weights = iter([Action("W", rank, microbatch) for microbatch in range(microbatches)])
    yield from islice(forwards, ranks - rank)
    for microbatch in range(microbatches):
        yield Action("I", rank, microbatch)
        if microbatch >= rank:
            yield from islice(weights, 1)
        yield from islice(forwards, 1)
    yield from weights


Split = str | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How a model is cut along the axis "pp", and how its stages run: `ParallelPlan.pipeline`.

    Raises ValueError for a value of another form.
    """

    #: "layers" cuts the model's only list of layers into parts as even as possible, longer parts first. A list's name,
    #: as "decoder.layers", does the same where there are several lists. Numbers, as (3, 4, 4, 3), are the layers of
    #: each stage. Names, as ("layers.3", "layers.7"), are the layers at which the second and later stages begin.
    #: Modules outside the list go to the stages that use them, by data flow.
    split: Split = "layers"
    schedule: ScheduleName = "1f1b"  #: the order of work on each rank; see `make_schedule`
    microbatches: int = 8  #: the number of parts, along the rows, into which a batch is cut
    chunks: int | None = None  #: stages on a rank; None for 2 under "interleaved" and else 1

    def __post_init__(self) -> None:
        if isinstance(self.split, list):
            object.__setattr__(self, "split", tuple(self.split))
        kinds = set(map(type, self.split)) if isinstance(self.split, tuple) else {type(self.split)}
        if not self.split or not isinstance(self.split, str | tuple) or kinds not in ({str}, {int}):
            raise ValueError(
                f'PipelinePlan: split is {self.split!r}; give "layers", the name of a list of layers, the number of '
                f"layers of each stage as (3, 4, 4, 3), or the names of the layers at which stages begin"
            )
        check_kinds(None, self)
        for name in ("microbatches", "chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"PipelinePlan: {name} is {value}; it must be 1 or more")

    @property
    def chunks_per_rank(self) -> int:
        """The number of stages on each rank: `chunks`, or the schedule's usual number."""
        return self.chunks or (2 if self.schedule == "interleaved" else 1)

    def make_schedule(self, ranks: int, microbatches: int | None = None) -> Schedule:
        """The schedule for this number of ranks. Raises ValueError as the function `make_schedule`.

        microbatches: of the step; None: the plan's own number.
        """
        count, chunks = microbatches or self.microbatches, self.chunks_per_rank
        return make_schedule(self.schedule, ranks=ranks, microbatches=count, chunks=chunks)

    def count_stages(self, ranks: int) -> int:
        """The number of stages on `ranks` ranks, without making the schedule. Raises ValueError as `make_schedule`."""
        _check_schedule(self.schedule, ranks=ranks, microbatches=self.microbatches, chunks=self.chunks_per_rank)
        return ranks * self.chunks_per_rank
