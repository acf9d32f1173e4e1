"""A plan's choices for a pipeline: where the model is cut, and the order of microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from .orders import make_schedule
from .schedule import NAMES, Name, Schedule

Split = str | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How a model is cut along the axis "pp", and how its stages run.

    split: "layers" cuts the model's only list of layers into parts as even as possible, longer parts first. A
        list's name, as "decoder.layers", does the same where there are several lists. Numbers, as (3, 4, 4, 3), are
        the layers of each stage. Names, as ("layers.3", "layers.7"), are the layers at which the second and later
        stages begin. Modules outside the list go to the stages that use them, by data flow.
    schedule: see `make_schedule`.
    microbatches: the number of parts, along the rows, into which a batch is cut.
    chunks: stages on a rank; None for 2 under "interleaved" and else 1.
    Raises ValueError for a value of another form.
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
                f'PipelinePlan: split is {self.split!r}; give "layers", the name of a list of layers, the number of '
                f"layers of each stage as (3, 4, 4, 3), or the names of the layers at which stages begin"
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
        """The schedule for this number of ranks. Raises ValueError as the function `make_schedule`."""
        chunks = self.chunks or (2 if self.schedule == "interleaved" else 1)
        return make_schedule(self.schedule, ranks=ranks, microbatches=microbatches or self.microbatches, chunks=chunks)
