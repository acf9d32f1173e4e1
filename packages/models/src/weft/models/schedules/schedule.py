"""A pipeline schedule as a value: what each rank does, in order. It knows no torch and no processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
SLOTS: dict[Kind, int] = {
    "F": 1,
    "B": 2,
    "I": 1,
    "W": 1,
}  # where a forward and the two halves of a backward take as long


class Action(NamedTuple):
    """What a rank does at once: `kind` of a microbatch on a stage.

    kind: F forward; B the whole backward; or its halves, I the gradient of the stage's input, and W those of its weights.
    stage: counted over the whole pipeline in the order of data, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} on stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of each rank of a pipeline, in the order in which it takes them.

    stages: of each rank, in the order of data; a stage is the part of the model between two cuts. actions: of each rank.
    Raises ValueError where a stage is on no rank or on two, where a rank acts on a stage of another, or where a microbatch has
    not one forward and one whole backward on each stage, in that order.
    """

    name: str
    microbatches: int
    stages: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        held = sorted(stage for own in self.stages for stage in own)
        if held != list(range(len(held))):
            raise ValueError(
                f"schedule {self.name!r}: the ranks hold the stages {held}; each of 0, 1, … must be on one rank"
            )
        for rank, (own, actions) in enumerate(zip(self.stages, self.actions, strict=True)):
            taken: dict[tuple[int, int], str] = {}
            for action in actions:
                if action.stage not in own or not 0 <= action.microbatch < self.microbatches:
                    raise ValueError(
                        f"schedule {self.name!r}: rank {rank} has {action}, but holds the stages {', '.join(map(str, own))} "
                        f"and there are {self.microbatches} microbatches"
                    )
                key = (action.stage, action.microbatch)
                taken[key] = taken.get(key, "") + action.kind
            for stage in own:
                for microbatch in range(self.microbatches):
                    kinds = taken.get((stage, microbatch), "")
                    if kinds not in ("FB", "FIW"):
                        raise ValueError(
                            f"schedule {self.name!r}: rank {rank} takes microbatch {microbatch} on stage {stage} by the actions "
                            f"{kinds or 'none'}; they must be F, B or F, I, W"
                        )

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Stages on a rank."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))

    def rank_of(self, stage: int) -> int:
        return next(rank for rank, own in enumerate(self.stages) if stage in own)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are found apart from those of inputs."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    def in_flight(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once, of a microbatch on a stage each: from its F to its B, or its W."""
        most = []
        for actions in self.actions:
            held = peak = 0
            for action in actions:
                held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
                peak = max(peak, held)
            most.append(peak)
        return tuple(most)

    def __str__(self) -> str:
        from .timeline import picture

        return picture(self)


def needs(action: Action, num_stages: int) -> Iterable[Action]:
    """The actions without which this one cannot begin; a B stands for either way in which a backward is taken."""
    kind, stage, microbatch = action
    if kind == "F" and stage:
        yield Action("F", stage - 1, microbatch)
    if kind in ("B", "I"):
        yield Action("F", stage, microbatch)
        if stage + 1 < num_stages:
            yield Action("B", stage + 1, microbatch)
    if kind == "W":
        yield Action("B", stage, microbatch)


def done(action: Action) -> Action:
    """The action as others wait for it: the gradient of an input is that of a B."""
    return action._replace(kind="B") if action.kind == "I" else action
