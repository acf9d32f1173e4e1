"""A hang as a value and as text: the calls of two ranks side by side, and the waits from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from .matching import MAKE_GROUP, NEW_GROUP, RECEIVE, SEND, Issued, Rule, Simulation

_WHERE: dict[Rule, str] = {  # backends on which a hang found under the rule occurs
    "gloo": "on every backend",
    "nccl": "where a device runs its collectives one at a time in the order of issue, as NCCL may; not on gloo",
}


@dataclass(frozen=True, slots=True)
class _Side:
    """A rank's call at a hang, or the lack of a call."""

    rank: int
    number: int | None  # of the call, from 1; None where the rank never issues the call
    call: Issued | None
    num_calls: int = 0  # where `call` is None: all calls of the rank

    def lines(self) -> list[str]:
        """The side as lines of text."""
        if self.call is None:
            calls = "1 call" if self.num_calls == 1 else f"{self.num_calls:,} calls"
            return [f"rank {self.rank}", "no such call", f"its step has {calls}"]
        return [f"rank {self.rank}, call {self.number:,}", describe(self.call), _group(self.call), self.call.site]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang: ranks wait for ever, or two calls do not fit. Returned by `find_hang`, `check_hangs`, `check_plan`."""

    kind: Literal["mismatch", "missing", "cycle"]  #: calls do not fit; a call never comes; ranks wait in a circle
    reason: str
    sides: tuple[_Side, _Side]  #: of "missing", the second has no call
    waits: tuple[str, ...] = ()  #: a line for each waiting call, from rank to rank, with the reason
    rule: Rule = "gloo"  #: under which the ranks hang; "nccl": not under gloo's
    note: str = ""  #: of "missing": the likely cause, where found

    hangs = True

    def __str__(self) -> str:
        left, right = (side.lines() for side in self.sides)
        width = max(map(len, left))
        rows = [f"  {a:{width}}  |  {b}".rstrip(" |") for a, b in zip_longest(left, right, fillvalue="")]
        lines = [self.reason, *rows]
        if self.waits:
            lines += ["waits", *(f"  {each}" for each in self.waits)]
        if self.note:
            lines.append(self.note)
        lines.append(f"hangs {_WHERE[self.rule]}")
        return "\n".join(lines)


def describe(call: Issued) -> str:
    """A call in words: "all-reduce of [4, 8] float32", "send of [2] int64 to rank 3, tag 1"."""
    if call.kind in (MAKE_GROUP, NEW_GROUP):
        return call.kind
    tensors = ", ".join(str(list(shape)) for shape in call.shapes)
    words = [call.kind, f"of {tensors} {call.dtype}" if tensors else ""]
    match call.kind:
        case "send":
            words.append(f"to rank {call.peer}")
        case "recv":
            words.append(f"from rank {call.peer}")
        case "broadcast":
            words.append(f"from source {call.peer}")
    if call.sent:
        words.append(f"in parts {_sizes(call.sent)}, received {_sizes(call.received)}")
    return " ".join(filter(None, words)) + (f", tag {call.tag}" if call.tag else "")


def _sizes(parts: Sequence[int]) -> str:
    shown = ", ".join(map(str, parts[:8]))
    return f"[{shown}, ...]" if len(parts) > 8 else f"[{shown}]"


def _group(call: Issued) -> str:
    if call.kind == NEW_GROUP:
        return f"of ranks {', '.join(map(str, call.shapes[0]))}"
    return f"group of {_format_members(call.members)}"


def _format_members(members: Sequence[int]) -> str:
    """Ranks in words: "ranks 0, 1, 4, 5"; of many ranks the first three, the last, and how many."""
    ranks = list(dict.fromkeys(members))
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]} ({len(ranks):,})"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def report(simulation: Simulation) -> Hang:
    """The hang of a simulation stopped with unfinished programs. Called by `find_hang`."""
    if simulation.mismatch is not None:
        return _mismatch(simulation)
    chains = []
    for rank in simulation.programs:
        number = simulation.waited_for(rank)
        if number is not None:
            chains.append(_follow(simulation, rank, number))
    assert chains, "a simulation that has not ended has a call that has not ended"
    missing = [each for each in chains if each.absent is not None]
    chain = min(missing or chains, key=lambda each: len(each.steps))
    return _missing(simulation, chain) if missing else _cycle(simulation, chain)


def _mismatch(simulation: Simulation) -> Hang:
    found = simulation.mismatch
    assert found is not None, "asked for by `report` where calls do not fit"
    sides = [_Side(rank, number + 1, simulation.calls[rank][number]) for rank, number in (found.first, found.second)]
    first, second = sides
    return Hang(
        kind="mismatch",
        reason=f"ranks {first.rank} and {second.rank} meet in calls that do not fit: {found.reason}",
        sides=(first, second),
        rule=simulation.rule,
    )


@dataclass(frozen=True, slots=True)
class _WaitingCall:
    """A waiting call of a chain."""

    rank: int
    number: int  # of the call, from 0
    why: str  # the call waits


@dataclass(frozen=True, slots=True)
class _Chain:
    """Waiting calls, each held up by the next: up to a call never issued, or once around a cycle."""

    steps: tuple[_WaitingCall, ...]
    absent: int | None = None  # the rank without a part in the last step's call; None for a cycle


def _follow(simulation: Simulation, rank: int, number: int) -> _Chain:
    """The chain from the unfinished call `number` of `rank`, each call followed by the call that holds it up."""
    steps: list[_WaitingCall] = []
    places: dict[tuple[int, int], int] = {}
    while (rank, number) not in places:
        places[rank, number] = len(steps)
        call = simulation.calls[rank][number]
        head = simulation.head(rank, number)
        if head != number:
            steps.append(_WaitingCall(rank, number, f"begins after call {head + 1:,} of the rank"))
            number = head
            continue
        other, index, never = _partner(simulation, rank, number, call)
        if never:
            steps.append(_WaitingCall(rank, number, f"rank {other} never issues its part"))
            return _Chain(tuple(steps), absent=other)
        awaited = simulation.waited_for(other) if index is None else index
        assert awaited is not None, "a rank that has not issued a later call waits for an earlier one"
        text = "has issued its part" if index is not None else f"issues its part after its call {awaited + 1:,}"
        steps.append(_WaitingCall(rank, number, f"rank {other} {text}"))
        rank, number = other, awaited
    return _Chain(tuple(steps[places[rank, number] :]))


def _partner(simulation: Simulation, rank: int, number: int, call: Issued) -> tuple[int, int | None, bool]:
    """The rank that holds up `call`, which is call `number` of `rank`.

    Returns (rank, number of the rank's part of the call or None where not issued yet, whether never issued).
    """
    if call.is_message:
        assert call.peer is not None, "a message has two ends"
        candidates = [call.peer] if call.peer in simulation.programs else []
    else:
        candidates = [each for each in simulation.present(call) if each != rank]
    place = sum(_in_same_order(each, call, simulation.rule) for each in simulation.calls[rank][:number])
    late: list[tuple[int, int | None, bool]] = []
    for other in candidates:
        calls = simulation.programs[other].calls
        parts = [i for i, each in enumerate(calls) if _is_part(each, call, rank, simulation.rule)]
        if place >= len(parts):
            return other, None, True
        index = parts[place]
        if index >= len(simulation.calls[other]):
            late.append((other, None, False))
        elif simulation.head(other, index) != index:
            late.append((other, index, False))
    assert late, "a call whose parts have all begun has ended"
    return late[0]


def _in_same_order(each: Issued, call: Issued, rule: Rule) -> bool:
    """Whether a rank's calls `each` and `call` find their counterparts in the order of issue."""
    if call.is_message:
        same_tag = rule == "nccl" or each.tag == call.tag
        return (each.kind, each.group, each.peer) == (call.kind, call.group, call.peer) and same_tag
    return not each.is_message and each.lane == call.lane


def _is_part(each: Issued, call: Issued, rank: int, rule: Rule) -> bool:
    """Whether `each`, a call of another rank, may be the counterpart of `call`, a call of `rank`."""
    if call.is_message:
        kind = RECEIVE if call.kind == SEND else SEND
        same_tag = rule == "nccl" or each.tag == call.tag
        return (each.kind, each.group, each.peer) == (kind, call.group, rank) and same_tag
    return not each.is_message and each.lane == call.lane


def _lines(simulation: Simulation, steps: Sequence[_WaitingCall]) -> tuple[str, ...]:
    lines = []
    for step in steps:
        call = simulation.calls[step.rank][step.number]
        at = f" ({call.site})" if call.site else ""
        lines.append(f"rank {step.rank} waits in call {step.number + 1:,}, {describe(call)}{at}: {step.why}")
    return tuple(lines)


def _missing(simulation: Simulation, chain: _Chain) -> Hang:
    last, absent = chain.steps[-1], chain.absent
    assert absent is not None, "the chain ends at a call that never comes"
    call = simulation.calls[last.rank][last.number]
    calls = simulation.programs[absent].calls
    what = {SEND: "a message that rank {} never receives", RECEIVE: "a message that rank {} never sends"}.get(
        call.kind, "a collective that rank {} never joins"
    )
    return Hang(
        kind="missing",
        reason=f"rank {last.rank} waits for {what.format(absent)}",
        sides=(_Side(last.rank, last.number + 1, call), _Side(absent, None, None, len(calls))),
        waits=_lines(simulation, chain.steps),
        rule=simulation.rule,
        note=_likely_cause(simulation, last.rank, absent, call),
    )


def _likely_cause(simulation: Simulation, rank: int, absent: int, call: Issued) -> str:
    """In words, the likely cause of a missing call; "" where unknown.

    Of a collective: where the two ranks' calls on the group first differ in kind, shapes or line of code. Of a message:
    the tags of the absent rank's messages with `rank`.
    """
    if call.is_message:
        tags = sorted({each.tag for each in simulation.programs[absent].calls if each.is_message and each.peer == rank})
        return f"rank {absent} has messages with rank {rank} under the tags {', '.join(map(str, tags))}" if tags else ""
    own, partner = (
        [
            (i, each)
            for i, each in enumerate(simulation.programs[each_rank].calls)
            if not each.is_message and each.lane == call.lane
        ]
        for each_rank in (rank, absent)
    )
    for (i, first), (j, second) in zip(own, partner, strict=False):
        if (first.kind, first.shapes, first.site) != (second.kind, second.shapes, second.site):
            return (
                f"on this group the ranks first differ at call {i + 1:,} of rank {rank}, {describe(first)} "
                f"({first.site}), and call {j + 1:,} of rank {absent}, {describe(second)} ({second.site})"
            )
    return ""


def _cycle(simulation: Simulation, chain: _Chain) -> Hang:
    steps = chain.steps
    first = steps[0]
    second = next((each for each in steps if each.rank != first.rank), first)
    ranks = list(dict.fromkeys(each.rank for each in steps))
    return Hang(
        kind="cycle",
        reason=f"{_format_members(ranks)} wait for one another in a circle",
        sides=(
            _Side(first.rank, first.number + 1, simulation.calls[first.rank][first.number]),
            _Side(second.rank, second.number + 1, simulation.calls[second.rank][second.number]),
        ),
        waits=_lines(simulation, steps),
        rule=simulation.rule,
    )
