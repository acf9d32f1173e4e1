"""A schedule on an axis of time: what runs when, what waits for what, and the picture of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from .orders import NAMES, bubble_formula
from .schedule import SLOTS, Action, Schedule, done, needs

Sends = Literal["buffered", "blocking"]
IDLE = "·"


class DeadlockError(RuntimeError):
    """Ranks of a schedule wait for each other; the message says which, and for what."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action of a schedule begins and ends. spans: of each rank, (action, begin, end) in its order."""

    schedule: Schedule
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def length(self) -> float:
        """Time from the first action of any rank to the last."""
        return max(span[-1][2] for span in self.spans if span)

    def idle(self, rank: int) -> float:
        """Time in which a rank does nothing, before its first action and after its last included."""
        return self.length - sum(end - begin for _, begin, end in self.spans[rank])


def run_through(
    schedule: Schedule,
    duration: Callable[[Action], float] = lambda action: SLOTS[action.kind],
    sends: Sends = "buffered",
) -> Timeline:
    """Every action at the first moment at which its rank is free and what it needs is there.

    duration: of an action; the slots where none is given. sends: "buffered", a rank goes on at once; "blocking", it goes on
        when what it sent is received, where a stage receives one message ahead in each direction: the next one is received
        when the action that takes the one before has begun.
    Raises DeadlockError where no rank can go on.
    """
    ends: dict[Action, float] = {}
    begins: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.ranks
    before = _before(schedule)
    room: list[Action | None] = [None] * schedule.ranks  # what has to begin before a rank's last message is received
    left = [list(reversed(actions)) for actions in schedule.actions]
    while any(left):
        went = False
        for rank, own in enumerate(left):
            awaited = room[rank]
            if not own or (awaited is not None and awaited not in begins):
                continue
            if awaited is not None:
                free[rank], room[rank] = max(free[rank], begins[awaited]), None
            needed = list(needs(own[-1], schedule.num_stages))
            if any(each not in ends for each in needed):
                continue
            action = own.pop()
            begin = max([free[rank], *(ends[each] for each in needed)])
            begins[done(action)] = begin
            ends[done(action)] = free[rank] = begin + duration(action)
            spans[rank].append((action, begin, free[rank]))
            if sends == "blocking":
                room[rank] = before.get(_receiver(action, schedule))
            went = True
        if not went:
            stuck = ", ".join(f"rank {rank} before {own[-1]}" for rank, own in enumerate(left) if own)
            raise DeadlockError(f"schedule {schedule.name!r} with {sends} sends: {stuck} wait for each other")
    return Timeline(schedule, tuple(map(tuple, spans)))


def _before(schedule: Schedule) -> dict[Action | None, Action]:
    """The action that takes the message before that of each action, on the same stage and in the same direction."""
    found: dict[Action | None, Action] = {}
    last: dict[tuple[int, str], Action] = {}
    for action in (done(action) for actions in schedule.actions for action in actions if action.kind != "W"):
        way = (action.stage, action.kind)
        if way in last:
            found[action] = last[way]
        last[way] = action
    return found


def _receiver(action: Action, schedule: Schedule) -> Action | None:
    """The action of another rank that is sent what this one made."""
    stage = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1, "W": -1}[action.kind]
    if not 0 <= stage < schedule.num_stages or schedule.rank_of(stage) == schedule.rank_of(action.stage):
        return None
    return Action("F" if action.kind == "F" else "B", stage, action.microbatch)


def picture(schedule: Schedule) -> str:
    """Ranks down, time across: F, B (the gradient of the input) and W (those of the weights) of each microbatch, and idle.

    Several stages on a rank are told apart by a letter: F0a, F0b. Below it the bubble, counted, beside its formula.
    """
    timeline = run_through(schedule)
    length = int(timeline.length)
    rows = []
    for spans in timeline.spans:
        cells = [IDLE] * length
        for action, begin, end in spans:
            shown = {"F": "F", "I": "B", "W": "W", "B": "BW"}[action.kind]
            letter = chr(ord("a") + action.stage // schedule.ranks) if schedule.chunks > 1 else ""
            for slot, kind in zip(range(int(begin), int(end)), shown, strict=True):
                cells[slot] = f"{kind}{action.microbatch}{letter}"
        rows.append(cells)
    width = max(len(cell) for cells in rows for cell in cells)
    lines = [
        f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells).rstrip() for rank, cells in enumerate(rows)
    ]
    return "\n".join([*lines, bubble_text(timeline)])


def bubble_text(timeline: Timeline) -> str:
    """The idle slots of a rank, counted, and what the formula gives."""
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
    """Asserts that two stages exchange microbatches in one order: what a stage sends first is taken first.

    Messages between two ranks then need no names. Raises ValueError where they would pass one another.
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
