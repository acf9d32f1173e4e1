"""`ActionFlow`: a schedule's actions in the order of their times; `flow_floor`: a lower bound of a pipeline's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ..schedules.schedule import Action, ActionKind, Schedule, as_prerequisite, simulate
from .bounds import StageSeconds

Position = Literal["first", "between", "last"]  # of a microbatch in the step


class FlowStep(NamedTuple):
    """An action of a schedule, in an `ActionFlow`."""

    action: Action
    rank: int
    duration: int  # index in `ActionFlow.durations`
    needed: int  # index in `ActionFlow.steps` of the step on the neighbouring stage with the action's input; -1: none
    is_sent: bool  # whether the input comes from another rank


@dataclass(frozen=True, slots=True)
class ActionFlow:
    """A schedule's actions, in an order in which each comes after the actions it needs. Computed once a schedule."""

    ranks: int
    steps: tuple[FlowStep, ...]
    durations: tuple[tuple[ActionKind, int, Position], ...]  # (kind, stage, position): equal actions last equally

    def ends(self, seconds: Sequence[float], message: float, begins: Sequence[float]) -> list[float]:
        """The end of each step in seconds. Sends do not wait; a message delays the receiver.

        seconds: by index of `durations`. message: seconds of a message. begins: when each rank is ready to start.
        """
        free = list(begins)
        ends: list[float] = []
        for _, rank, duration, needed, is_sent in self.steps:
            begin = free[rank]
            if needed >= 0:
                arrival = ends[needed] + message if is_sent else ends[needed]
                if arrival > begin:
                    begin = arrival
            free[rank] = end = begin + seconds[duration]
            ends.append(end)
        return ends

    def last_ends(self, ends: Sequence[float]) -> list[float]:
        """The end of each rank's last step. ends: from `ends`."""
        last = [0.0] * self.ranks
        for step, end in zip(self.steps, ends, strict=True):
            last[step.rank] = end
        return last


def flow_floor(
    schedule: Schedule,
    stages: StageSeconds,
    *,
    message: float = 0.0,
    begins: Sequence[float],
    gradients: Sequence[float],
) -> float:
    """A lower bound of the seconds until all ranks of a pipeline have their gradients.

    stages: lower bounds of the passes on each stage. message: seconds of a message between stages. begins: when each
    rank is ready to start. gradients: seconds of each rank after its last action.
    Shorter actions in the same order end no later, so lower bounds of all actions bound the end, too.
    Raises ValueError for a schedule that splits the backward.
    """
    if schedule.splits_backward:
        raise ValueError(f"the schedule {schedule.name!r} splits the backward, and no bounds of the halves are known")
    flow = flow_of(schedule)
    of_kind = {
        ("F", True): stages.first_forward, ("B", True): stages.first_backward,
        ("F", False): stages.forward, ("B", False): stages.backward,
    }  # fmt: skip
    seconds = [of_kind[kind, position == "first"][stage] for kind, stage, position in flow.durations]
    done = flow.last_ends(flow.ends(seconds, message, begins))
    return max(end + last for end, last in zip(done, gradients, strict=True))


@lru_cache(maxsize=64)
def flow_of(schedule: Schedule) -> ActionFlow:
    """The actions of a schedule, ordered by the times of `simulate`."""
    rank_of = {stage: rank for rank, own in enumerate(schedule.stages) for stage in own}
    spans = simulate(schedule).spans  # each a slot or more long, so needed actions begin earlier
    ordered = sorted((begin, rank, action) for rank, own in enumerate(spans) for action, begin, _ in own)
    positions: dict[Action, int] = {}
    durations: dict[tuple[ActionKind, int, Position], int] = {}
    steps: list[FlowStep] = []
    for _, rank, action in ordered:
        kind, stage, microbatch = action
        position: Position = "between"
        if microbatch == 0:
            position = "first"
        elif microbatch == schedule.microbatches - 1:
            position = "last"
        neighbour = {"F": stage - 1, "B": stage + 1, "I": stage + 1, "W": -1}[kind]
        needed = positions.get(Action("F" if kind == "F" else "B", neighbour, microbatch), -1)
        duration = durations.setdefault((kind, stage, position), len(durations))
        positions[as_prerequisite(action)] = len(steps)
        steps.append(FlowStep(action, rank, duration, needed, needed >= 0 and rank_of[neighbour] != rank))
    return ActionFlow(schedule.ranks, tuple(steps), tuple(durations))
