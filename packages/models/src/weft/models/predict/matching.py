"""Matches the collectives and messages of all ranks: a `Simulation` runs the ranks' programs together.

Pure values, without torch. `hangs.CallRecorder` makes the programs: lists of calls and waits. Where a simulation stops
early, `hang_report` says which rank waits for which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# How a device runs the calls of a rank:
# "gloo": collectives on a group run in the order of issue; groups do not wait for each other. Messages match by tag.
# "nccl": all collectives of a device run in the order of issue, whatever their groups, because NCCL may run a single
#   collective at a time. Messages between two ranks of a group, in both directions, also run in the order of issue,
#   except within a `batch_isend_irecv`. Messages match by order, because NCCL knows no tags.
# Under both rules a send ends when received, and a rank stops at a wait until the awaited call has ended.
Rule = Literal["gloo", "nccl"]

SEND, RECEIVE = "send", "recv"
MAKE_GROUP, NEW_GROUP = "make group", "new_group"  # the host waits, no device is involved


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A rank's call: a collective, a send, a receive, or the making of a group."""

    kind: str  # "all-reduce", "send", "recv", "barrier", ..., `MAKE_GROUP`, `NEW_GROUP`
    group: str  # a key, equal on all members of the group; no two groups share a key
    members: tuple[int, ...]  # the group's ranks, in the group's order
    shapes: tuple[tuple[int, ...], ...] = ()  # of the rank's tensors; for `NEW_GROUP`, the ranks of the new group
    dtype: str = ""
    peer: int | None = None  # of a send, the receiver's rank; of a receive, the sender's; of a broadcast, the source's
    # Of a message: receiver's rank less sender's. Tells peers apart that `Kinds.relabel` gave the same rank.
    offset: int = 0
    tag: int = 0
    # Elements or rows to and from each member in an all-to-all of uneven parts, in the order of `members`.
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    batch: int = 0  # sends and receives with the same number above 0 are issued together, by `batch_isend_irecv`
    site: str = ""  # line of code and module of the call

    @property
    def is_message(self) -> bool:
        return self.kind in (SEND, RECEIVE)

    @property
    def lane(self) -> tuple[str, str]:
        """Calls of a group with the same lane match in order. Making a group has a lane apart from collectives'."""
        return self.group, self.kind if self.kind in (MAKE_GROUP, NEW_GROUP) else ""

    @property
    def num_elements(self) -> int:
        """The number of elements of all tensors given."""
        total = 0
        for shape in self.shapes:
            elements = 1
            for size in shape:
                elements *= size
            total += elements
        return total


CallOrWait = Issued | int  # a call, or a wait until the rank's call n, counted from 0, has ended


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's calls and waits in a step, in order."""

    rank: int
    events: tuple[CallOrWait, ...]

    @property
    def calls(self) -> list[Issued]:
        """The events without the waits; a call's place here is the call's number."""
        return [each for each in self.events if isinstance(each, Issued)]


def difference(first: Issued, rank: int, second: Issued, other: int) -> str | None:
    """Why two ranks' calls cannot be the two sides of a collective or a message; None where the calls fit.

    rank, other: the ranks of `first` and `second`. For a message, `first` is the send.
    """
    if first.is_message or second.is_message:
        if {first.kind, second.kind} != {SEND, RECEIVE}:
            return "different kinds"
        if first.tag != second.tag:
            return "different tags, which NCCL does not compare"
    elif first.kind != second.kind:
        return "different kinds"
    if first.dtype != second.dtype:
        return "different dtypes"
    if first.kind == NEW_GROUP:  # `shapes` lists the ranks of the group to make
        return "different ranks of the new group" if first.shapes != second.shapes else None
    if first.kind == "broadcast" and first.peer != second.peer:
        return "different sources"
    if first.kind == "all-to-all" and (first.sent or second.sent):
        return _difference_of_parts(first, rank, second, other)
    return "different sizes" if first.num_elements != second.num_elements else None


def _difference_of_parts(first: Issued, rank: int, second: Issued, other: int) -> str | None:
    if not first.sent or not second.sent:
        return "even parts on one rank, uneven parts on the other"
    for giver, at, taker, to in ((first, rank, second, other), (second, other, first, rank)):
        if giver.sent[giver.members.index(to)] != taker.received[taker.members.index(at)]:
            return "different sizes of a part"
    return None


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """Two calls matched with each other, although the calls do not fit."""

    reason: str  # of `difference`
    first: tuple[int, int]  # rank, number of the call from 0
    second: tuple[int, int]


class Simulation:
    """Runs the ranks' programs together, each rank up to its next wait. Made and run by `find_hang`.

    The order in which ranks advance does not change the result: a call that can end stays able to end.
    programs: by rank. rule: how a device runs calls, see `Rule`.
    """

    def __init__(self, programs: Mapping[int, Program], rule: Rule) -> None:
        self.programs, self.rule = programs, rule
        self.position = dict.fromkeys(programs, 0)  # of each rank's next event
        self.calls: dict[int, list[Issued]] = {rank: [] for rank in programs}  # issued until now
        self.ended: dict[int, bytearray] = {rank: bytearray() for rank in programs}  # by number of the call
        self.queues: dict[Hashable, deque[int]] = {}  # by `queue_of`: a rank's unfinished collectives, run in order
        self._pairs: dict[Hashable, deque[list[int]]] = {}  # by `_pair_of`, NCCL: messages; a list's begin together
        self._heads: dict[Hashable, list[int]] = {}  # by lane: ranks that have begun the lane's next collective
        self._unmatched: dict[Hashable, deque[tuple[int, int]]] = {}  # by `_channel`: (rank, number), begun, not ended
        self._blocked: dict[tuple[int, int], int] = {}  # (rank, number) of an awaited call -> rank
        self._runnable = deque(programs)
        self.mismatch: _Mismatch | None = None

    def run(self) -> None:
        """Advance all ranks until no rank can go on, or until there is a `mismatch`."""
        while self._runnable and self.mismatch is None:
            self._advance(self._runnable.popleft())

    def _advance(self, rank: int) -> None:
        events = self.programs[rank].events
        while self.position[rank] < len(events) and self.mismatch is None:
            event = events[self.position[rank]]
            if isinstance(event, int):
                if not self.ended[rank][event]:
                    self._blocked[rank, event] = rank
                    return
            else:
                self.calls[rank].append(event)
                self.ended[rank].append(False)
                self._issue(rank, len(self.calls[rank]) - 1, event)
            self.position[rank] += 1

    def waited_for(self, rank: int) -> int | None:
        """The number of the call awaited by the rank; past the last event, of the rank's first unfinished call."""
        events, position = self.programs[rank].events, self.position[rank]
        event = events[position] if position < len(events) else None
        if isinstance(event, int):
            return event
        number = self.ended[rank].find(False)
        return None if number < 0 else number

    def queue_of(self, rank: int, call: Issued) -> Hashable:
        """The key in `queues` under which a collective of `rank` waits for earlier collectives of the rank."""
        is_on_device = not call.lane[1]
        return (rank,) if self.rule == "nccl" and is_on_device else (rank, *call.lane)

    def present(self, call: Issued) -> Collection[int]:
        """The members of a call's group with a program here."""
        return dict.fromkeys(each for each in call.members if each in self.programs)

    def head(self, rank: int, number: int) -> int:
        """The number of the rank's call still to end before the call `number` begins; `number` if begun already."""
        call = self.calls[rank][number]
        if not call.is_message:
            return self.queues[self.queue_of(rank, call)][0]
        pair = self._pairs.get(self._pair_of(rank, call))
        return pair[0][0] if pair and number not in pair[0] else number

    def _issue(self, rank: int, number: int, call: Issued) -> None:
        if call.is_message:
            self._issue_message(rank, number, call)
            return
        queue = self.queues.setdefault(self.queue_of(rank, call), deque())
        queue.append(number)
        if len(queue) == 1:
            self._come_to(rank, call)

    def _come_to(self, rank: int, call: Issued) -> None:
        """Begin a rank's collective, the first of its queue; end the collective once all members have begun."""
        arrivals = deque([(rank, call)])
        while arrivals:
            rank, call = arrivals.popleft()
            ranks = self._heads.setdefault(call.lane, [])
            ranks.append(rank)
            if len(ranks) < len(self.present(call)):
                continue
            del self._heads[call.lane]
            heads = [(each, self.queues[self.queue_of(each, call)][0]) for each in ranks]
            if not self._fit(heads):
                return
            for each, number in heads:
                queue = self.queues[self.queue_of(each, call)]
                queue.popleft()
                if queue:
                    arrivals.append((each, self.calls[each][queue[0]]))
                self._end(each, number)

    def _fit(self, heads: list[tuple[int, int]]) -> bool:
        """Whether the calls (rank, number) are one collective; sets `mismatch` where not."""
        (rank, number), *further = heads
        first = self.calls[rank][number]
        for each, own_number in heads if first.sent else ():
            own = self.calls[each][own_number]
            place = own.members.index(each)
            if own.sent and own.members.count(each) > 1 and own.sent[place] != own.received[place]:
                self.mismatch = _Mismatch("different sizes of a part", (each, own_number), (each, own_number))
                return False
        for other, other_number in further:
            second = self.calls[other][other_number]
            reason = None if second is first and not first.sent else difference(first, rank, second, other)
            if reason is not None:
                self.mismatch = _Mismatch(reason, (rank, number), (other, other_number))
                return False
        return True

    def _pair_of(self, rank: int, call: Issued) -> Hashable:
        """The key in `_pairs` of a rank's messages with a peer on a group, both directions together."""
        return rank, call.group, call.peer, abs(call.offset)

    def _issue_message(self, rank: int, number: int, call: Issued) -> None:
        if call.peer not in self.programs:
            self._end(rank, number)
            return
        if self.rule == "nccl":
            pair = self._pairs.setdefault(self._pair_of(rank, call), deque())
            last = self.calls[rank][pair[-1][0]] if pair else None
            if last is not None and call.batch and last.batch == call.batch:
                pair[-1].append(number)
            else:
                pair.append([number])
            if len(pair) > 1:
                return
        self._begin_message(rank, number, call)

    def _begin_message(self, rank: int, number: int, call: Issued) -> None:
        starting = deque([(rank, number, call)])
        while starting:
            rank, number, call = starting.popleft()
            self._unmatched.setdefault(self._channel(rank, call), deque()).append((rank, number))
            sends, receives = (self._unmatched.get(self._channel(rank, call, kind)) for kind in (SEND, RECEIVE))
            if not sends or not receives:
                continue
            send, receive = sends.popleft(), receives.popleft()
            a, b = (self.calls[each][i] for each, i in (send, receive))
            reason = difference(a, send[0], b, receive[0])
            if reason is not None:
                self.mismatch = _Mismatch(reason, send, receive)
                return
            for each, i in (send, receive):
                self._end(each, i)
                starting.extend(self._next_messages(each, i))

    def _next_messages(self, rank: int, number: int) -> Iterator[tuple[int, int, Issued]]:
        """The messages of `rank` to begin now, after the end of the rank's message `number`."""
        pair = self._pairs.get(self._pair_of(rank, self.calls[rank][number]))
        if pair is None:
            return
        pair[0].remove(number)
        if not pair[0]:
            pair.popleft()
            if pair:
                yield from ((rank, each, self.calls[rank][each]) for each in pair[0])

    def _channel(self, rank: int, call: Issued, kind: str | None = None) -> Hashable:
        """The key in `_unmatched` of a side of a message's channel. kind: SEND or RECEIVE; None for the call's own."""
        ends = (rank, call.peer) if call.kind == SEND else (call.peer, rank)
        tag = call.tag if self.rule == "gloo" else 0
        return kind or call.kind, call.group, ends, call.offset, tag

    def _end(self, rank: int, number: int) -> None:
        self.ended[rank][number] = True
        if self._blocked.pop((rank, number), None) is not None:
            self._runnable.append(rank)

    @property
    def has_ended(self) -> bool:
        """Whether every rank is past the last event and every call has ended."""
        return self.mismatch is None and all(
            self.position[rank] == len(program.events) and all(self.ended[rank])
            for rank, program in self.programs.items()
        )
