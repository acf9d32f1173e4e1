"""What a plan says of a pipeline: where the model is cut, and in which order microbatches go through it."""

from __future__ import annotations

from dataclasses import dataclass

from .bubble import NAMES, Name
from .orders import make_schedule
from .schedule import Schedule

Split = str | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How a model is cut along the axis "pp", and how its stages are run.

    split: "layers", the model's list of layers in parts as even as can be, the longer ones first; the name of that list where
        there are several, as in "decoder.layers"; how many layers each stage has, (3, 4, 4, 3); or the names of the layers at
        which the second stage and those after it begin, ("layers.3", "layers.7"). What is outside the list goes by data flow
        to the stages that use it.
    schedule: see `make_schedule`. microbatches: the parts, along the rows, that a batch is taken in.
    chunks: stages on a rank; 2 where the schedule is "interleaved" and None is given, else 1.
    Raises ValueError for what none of these can be.
    """

    split: Split = "layers"
    schedule: Name = "1f1b"
    microbatches: int = 8
    chunks: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.split, list):
            object.__setattr__(self, "split", tuple(self.split))
        kinds = set(map(type, self.split)) if isinstance(self.split, tuple) else {type(self.split)}
        if not self.split or not isinstance(self.split, str | tuple) or kinds not in ({str}, {int}):
            raise ValueError(
                f'PipelinePlan: split is {self.split!r}; give "layers", the name of a list of layers, the layers of each stage '
                f"as (3, 4, 4, 3), or the names of those at which stages begin"
            )
        if self.schedule not in NAMES:
            raise ValueError(
                f"PipelinePlan: schedule is {self.schedule!r}; it must be one of {', '.join(map(repr, NAMES))}"
            )
        for name in ("microbatches", "chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"PipelinePlan: {name} is {value}; it must be 1 or more")

    def make_schedule(self, ranks: int, microbatches: int | None = None) -> Schedule:
        """The schedule on so many ranks. Raises ValueError where its conditions are not met, naming them."""
        chunks = self.chunks or (2 if self.schedule == "interleaved" else 1)
        return make_schedule(self.schedule, ranks=ranks, microbatches=microbatches or self.microbatches, chunks=chunks)
