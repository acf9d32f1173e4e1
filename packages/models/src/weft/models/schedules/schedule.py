"""A pipeline schedule as a value: each rank's actions in order, their times, and a picture.

`NAMES` lists the schedules by name, and `bubble_formula` gives the idle share of a schedule's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def bubble_formula(name: ScheduleName, *, ranks: int, microbatches: int, chunks: int = 1) -> tuple[int, int]:
    """The idle share of a rank's time as (idle, all), in slots: a forward, and each half of a backward, takes a slot.

    With p ranks, m microbatches and v chunks: GPipe and 1F1B (p-1)/(m+p-1); interleaved (p-1)/(v m+p-1);
    zero_bubble (p-1)/(3m+p-1). Valid where m is p or more.
    """
    idle = ranks - 1
    match name:
        case "zero_bubble":
            return idle, 3 * microbatches + idle
        case "interleaved":
            return 3 * idle, 3 * (chunks * microbatches + idle)
    return 3 * idle, 3 * (microbatches + idle)


# F: forward. B: backward. Or the halves of a backward: I, the input gradient; W, the weight gradients.
ActionKind = Literal["F", "B", "I", "W"]
Sends = Literal["buffered", "blocking"]
IDLE = "·"
# The time of each action, if a forward and the two halves of a backward take equally long.
SLOTS: dict[ActionKind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}


class Action(NamedTuple):
    """A part of a rank's work: the forward or backward of a microbatch on a stage."""

    kind: ActionKind
    stage: int  # from 0, over the whole pipeline, in the order of data
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} on stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of each rank of a pipeline, in order. Made by `make_schedule`.

    Raises ValueError where a stage is on no rank or on two, where a rank acts on a stage of another rank, or where
    a microbatch does not have exactly one forward, and then one whole backward, on each stage.
    """

    name: str
    microbatches: int
    stages: tuple[tuple[int, ...], ...]  # of each rank, in the order of data; a stage is the model between two cuts
    actions: tuple[tuple[Action, ...], ...]  # of each rank, in order

    def __post_init__(self) -> None:
        held_stages = sorted(stage for own in self.stages for stage in own)
        if held_stages != list(range(len(held_stages))):
            raise ValueError(
                f"schedule {self.name!r}: the ranks hold the stages {held_stages}; each of 0, 1, … must be on one rank"
            )
        for rank, (own, actions) in enumerate(zip(self.stages, self.actions, strict=True)):
            performed: dict[tuple[int, int], str] = {}
            for action in actions:
                if action.stage not in own or not 0 <= action.microbatch < self.microbatches:
                    raise ValueError(
                        f"schedule {self.name!r}: rank {rank} has {action}, but holds the stages "
                        f"{', '.join(map(str, own))} and there are {self.microbatches} microbatches"
                    )
                key = (action.stage, action.microbatch)
                performed[key] = performed.get(key, "") + action.kind
            for stage in own:
                for microbatch in range(self.microbatches):
                    kinds = performed.get((stage, microbatch), "")
                    if kinds not in ("FB", "FIW"):
                        raise ValueError(
                            f"schedule {self.name!r}: rank {rank} takes microbatch {microbatch} on stage {stage} by "
                            f"the actions {kinds or 'none'}; they must be F, B or F, I, W"
                        )

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """The number of stages on each rank."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))

    def rank_of(self, stage: int) -> int:
        return next(rank for rank, own in enumerate(self.stages) if stage in own)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed in actions of their own, apart from input gradients."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    def in_flight(self) -> tuple[int, ...]:
        """The most activations held at once by each rank, counting a microbatch once for each stage.

        An activation is held from the F of the microbatch on the stage to the B, or to the W.
        """
        most = []
        for actions in self.actions:
            num_held = peak = 0
            for action in actions:
                num_held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
                peak = max(peak, num_held)
            most.append(peak)
        return tuple(most)

    def __str__(self) -> str:
        return _draw_schedule(self)


def _prerequisites(action: Action, num_stages: int) -> Iterable[Action]:
    """The actions that must end before this action begins; a backward is given as B, even if split into I and W."""
    kind, stage, microbatch = action
    if kind == "F" and stage:
        yield Action("F", stage - 1, microbatch)
    if kind in ("B", "I"):
        yield Action("F", stage, microbatch)
        if stage + 1 < num_stages:
            yield Action("B", stage + 1, microbatch)
    if kind == "W":
        yield Action("B", stage, microbatch)


def as_prerequisite(action: Action) -> Action:
    """The action as named by `_prerequisites`: I becomes B, since neighboring stages need only a B's input gradient."""
    return action._replace(kind="B") if action.kind == "I" else action


class DeadlockError(RuntimeError):
    """Ranks of a schedule wait for each other; the message says before which actions."""


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """When each action of a schedule begins and ends. Made by `simulate`."""

    schedule: Schedule
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]  # of each rank, (action, begin, end) in order

    @property
    def length(self) -> float:
        """The time from the beginning of the first action of any rank to the end of the last."""
        return max(span[-1][2] for span in self.spans if span)

    def idle(self, rank: int) -> float:
        """The time in which a rank does nothing, from the beginning of the step to the end."""
        return self.length - sum(end - begin for _, begin, end in self.spans[rank])


def simulate(
    schedule: Schedule,
    duration: Callable[[Action], float] = lambda action: SLOTS[action.kind],
    sends: Sends = "buffered",
) -> ScheduleTimeline:
    """The times of all actions. An action begins as soon as the rank is free and the inputs are there.

    duration: of an action; slots by default.
    sends: "buffered": a rank goes on after a send at once. "blocking": a rank goes on when the message is received.
        A stage receives a message ahead in each direction: a message is received when the action begins that uses
        the previous message.
    Raises DeadlockError where no rank can go on.
    """
    ends: dict[Action, float] = {}
    begins: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.ranks
    previous_users = _previous_users(schedule)
    blocked_by: list[Action | None] = [None] * schedule.ranks  # must begin before the rank's last message is received
    remaining = [list(reversed(actions)) for actions in schedule.actions]
    while any(remaining):
        progressed = False
        for rank, own in enumerate(remaining):
            awaited = blocked_by[rank]
            if not own or (awaited is not None and awaited not in begins):
                continue
            if awaited is not None:
                free[rank], blocked_by[rank] = max(free[rank], begins[awaited]), None
            needed = list(_prerequisites(own[-1], schedule.num_stages))
            if any(each not in ends for each in needed):
                continue
            action = own.pop()
            begin = max([free[rank], *(ends[each] for each in needed)])
            begins[as_prerequisite(action)] = begin
            ends[as_prerequisite(action)] = free[rank] = begin + duration(action)
            spans[rank].append((action, begin, free[rank]))
            if sends == "blocking":
                blocked_by[rank] = previous_users.get(_receiver(action, schedule))
            progressed = True
        if not progressed:
            stuck = ", ".join(f"rank {rank} before {own[-1]}" for rank, own in enumerate(remaining) if own)
            raise DeadlockError(f"schedule {schedule.name!r} with {sends} sends: {stuck} wait for each other")
    return ScheduleTimeline(schedule, tuple(map(tuple, spans)))


def _previous_users(schedule: Schedule) -> dict[Action | None, Action]:
    """For each action, the action on the same stage that uses the previous message from the same direction."""
    previous: dict[Action | None, Action] = {}
    last: dict[tuple[int, str], Action] = {}
    for action in (as_prerequisite(action) for actions in schedule.actions for action in actions if action.kind != "W"):
        direction = (action.stage, action.kind)
        if direction in last:
            previous[action] = last[direction]
        last[direction] = action
    return previous


def _receiver(action: Action, schedule: Schedule) -> Action | None:
    """The action, on another rank, that uses the output of this action; None if there is none."""
    stage = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1, "W": -1}[action.kind]
    if not 0 <= stage < schedule.num_stages or schedule.rank_of(stage) == schedule.rank_of(action.stage):
        return None
    return Action("F" if action.kind == "F" else "B", stage, action.microbatch)


def _draw_schedule(schedule: Schedule) -> str:
    """A picture of the schedule: ranks of "pp" down, time across; then the idle share, as counted and by the formula.

    Each cell is a slot: F, B (the input gradient) or W (the weight gradients) with the number of the microbatch, or
    idle. Several stages on a rank are told apart by a letter, as in F0a, F0b.
    """
    timeline = simulate(schedule)
    length = int(timeline.length)
    rows = []
    for spans in timeline.spans:
        cells = [IDLE] * length
        for action, begin, end in spans:
            slot_kinds = {"F": "F", "I": "B", "W": "W", "B": "BW"}[action.kind]
            letter = chr(ord("a") + action.stage // schedule.ranks) if schedule.chunks > 1 else ""
            for slot, kind in zip(range(int(begin), int(end)), slot_kinds, strict=True):
                cells[slot] = f"{kind}{action.microbatch}{letter}"
        rows.append(cells)
    width = max(len(cell) for cells in rows for cell in cells)
    lines = [f"pp={rank}  " + " ".join(cell.ljust(width) for cell in cells).rstrip() for rank, cells in enumerate(rows)]
    return "\n".join([*lines, _bubble_text(timeline)])


def _bubble_text(timeline: ScheduleTimeline) -> str:
    """The idle slots of a rank, as counted, and the idle share by the formula."""
    schedule = timeline.schedule
    idle = sorted({int(timeline.idle(rank)) for rank in range(schedule.ranks)})
    counted = f"{idle[0]}" if len(idle) == 1 else f"{idle[0]} to {idle[-1]}"
    text = f"bubble: {counted} of {int(timeline.length)} slots idle on a rank ({idle[-1] / timeline.length:.1%})"
    for name in NAMES:
        if name == schedule.name:
            sizes = {"ranks": schedule.ranks, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
            share = Fraction(*bubble_formula(name, **sizes))
            text += f"; the formula's is {float(share):.1%}"
    return text


def check_order(schedule: Schedule) -> None:
    """Check that neighboring stages take microbatches in the same order, in each direction.

    A stage then uses messages in the order in which they are sent, and messages between two ranks need no names.
    Raises ValueError where a message would pass another.
    """
    for kinds in (("F",), ("B", "I")):
        sequences = {
            stage: [action.microbatch for action in actions if action.stage == stage and action.kind in kinds]
            for actions, own in zip(schedule.actions, schedule.stages, strict=True)
            for stage in own
        }
        for first, second in pairwise(sorted(sequences)):
            if sequences[first] != sequences[second]:
                raise ValueError(
                    f"schedule {schedule.name!r}: stage {first} takes the {kinds[0]} of microbatches in the order "
                    f"{sequences[first]}, and stage {second} in {sequences[second]}; a message would pass another"
                )
