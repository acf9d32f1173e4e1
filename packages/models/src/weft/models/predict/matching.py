"""Matches the collectives and messages of all ranks: ranks run their programs together, each until a call waits.

Pure values, without torch: a rank's program is a list of calls and waits, as `hangs.record_program` records it. Where
the ranks of a `Simulation` stop, `hang_report` says which rank waits for which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# How a device runs the calls of a rank:
# "gloo": the calls on a group run in the order of issue, beside the calls on further groups. Messages match by tag.
# "nccl": all collectives of a device run in the order of issue, whatever their groups, because NCCL may give the device
#   to one at a time. Messages between two ranks of a group run in the order of issue too, both ways together, unless
#   issued by the same `batch_isend_irecv`; messages match by order, because NCCL knows no tags.
# Under both, a send ends when it is received, and a rank goes no further than a wait until the call has ended.
Rule = Literal["gloo", "nccl"]

SEND, RECEIVE = "send", "recv"
MAKE_GROUP, NEW_GROUP = "make group", "new_group"  # the host waits, no device is involved


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective, a send or a receive as a rank issues it, or a group that a rank makes with the other members."""

    kind: str  # "all-reduce", "send", "recv", "barrier", ...
    group: str  # equal on all members of the group, and different for every other group
    members: tuple[int, ...]  # the group's ranks, in the group's order
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors given
    dtype: str = ""
    peer: int | None = None  # the other end's rank, of a send or a receive; the source's, of a broadcast
    offset: int = 0  # receiver's rank less sender's rank
    tag: int = 0
    # Elements or rows to and from each member in an all-to-all of uneven parts, in the order of `members`.
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    batch: int = 0  # sends and receives with the same number above 0 are issued together, by `batch_isend_irecv`
    site: str = ""  # the line of code, and the module, that issues the call

    @property
    def is_message(self) -> bool:
        return self.kind in (SEND, RECEIVE)

    @property
    def lane(self) -> tuple[str, str]:
        """Calls of a lane match in order among members; making a group does not wait for the group's collectives."""
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


Event = Issued | int  # a number n: the rank waits until its call n, counted from 0, has ended


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's calls and waits in a step, in order."""

    rank: int
    events: tuple[Event, ...]

    @property
    def calls(self) -> list[Issued]:
        return [each for each in self.events if isinstance(each, Issued)]


def difference(first: Issued, rank: int, second: Issued, other: int) -> str | None:
    """Why two calls that meet are not one collective or one message; None for calls that fit.

    rank, other: the ranks that issue `first` and `second`. Of two messages, `first` is the send.
    """
    if first.is_message or second.is_message:
        if {first.kind, second.kind} != {SEND, RECEIVE}:
            return "other kinds"
        if first.tag != second.tag:
            return "other tags, which NCCL does not compare"
    elif first.kind != second.kind:
        return "other kinds"
    if first.dtype != second.dtype:
        return "other dtypes"
    if first.kind == NEW_GROUP:  # `shapes` lists the ranks of the group to make
        return "other ranks of the new group" if first.shapes != second.shapes else None
    if first.kind == "broadcast" and first.peer != second.peer:
        return "other sources"
    if first.kind == "all-to-all" and (first.sent or second.sent):
        return _difference_of_parts(first, rank, second, other)
    return "other sizes" if first.num_elements != second.num_elements else None


def _difference_of_parts(first: Issued, rank: int, second: Issued, other: int) -> str | None:
    if not first.sent or not second.sent:
        return "even parts on one rank, uneven parts on the other"
    for giver, at, taker, to in ((first, rank, second, other), (second, other, first, rank)):
        if giver.sent[giver.members.index(to)] != taker.received[taker.members.index(at)]:
            return "other sizes of a part"
    return None


@dataclass(frozen=True, slots=True)
class Meeting:
    """Two calls that meet and do not fit."""

    reason: str
    first: tuple[int, int]  # rank, number of the call
    second: tuple[int, int]


class Simulation:
    """Runs the ranks' programs together, each rank until a call waits. Made and run by `find_hang`.

    The order in which ranks advance makes no difference: a call able to end stays able to end.
    """

    def __init__(self, programs: Mapping[int, Program], rule: Rule) -> None:
        self.programs, self.rule = programs, rule
        self.position = dict.fromkeys(programs, 0)  # of each rank's next event
        self.calls: dict[int, list[Issued]] = {rank: [] for rank in programs}  # issued so far
        self.ended: dict[int, bytearray] = {rank: bytearray() for rank in programs}  # by number of the call
        self.queues: dict[Hashable, deque[int]] = {}  # collectives of a rank that run in order
        self._pairs: dict[Hashable, deque[list[int]]] = {}  # messages of a rank likewise; each list begins together
        self._heads: dict[Hashable, list[int]] = {}  # by lane: the ranks whose queue has come to its call
        self._unmatched: dict[Hashable, deque[tuple[int, int]]] = {}  # messages not received yet, by channel and kind
        self._blocked: dict[tuple[int, int], int] = {}  # call waited for -> rank
        self._runnable = deque(programs)
        self.mismatch: Meeting | None = None

    def run(self) -> None:
        """Advance all ranks until none can go on, or two calls meet that do not fit."""
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
        """The number of the call for which a rank waits; for a rank after its last event, the first unfinished call."""
        events, position = self.programs[rank].events, self.position[rank]
        event = events[position] if position < len(events) else None
        if isinstance(event, int):
            return event
        number = self.ended[rank].find(False)
        return None if number < 0 else number

    def queue_of(self, rank: int, call: Issued) -> Hashable:
        """The key in `queues` of the calls of `rank` that run in order with `call`."""
        is_on_device = not call.lane[1]
        return (rank,) if self.rule == "nccl" and is_on_device else (rank, *call.lane)

    def present(self, call: Issued) -> Collection[int]:
        """The members of a call's group that take part in the simulation."""
        return dict.fromkeys(each for each in call.members if each in self.programs)

    def head(self, rank: int, number: int) -> int:
        """The call of `rank` that must end before the call `number` begins; `number` if the call has begun."""
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
        """A rank's queue has come to a call. The collective runs if all members have come."""
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
        (rank, number), *further = heads
        first = self.calls[rank][number]
        for each, own_number in heads if first.sent else ():
            own = self.calls[each][own_number]
            place = own.members.index(each)
            if own.sent and own.members.count(each) > 1 and own.sent[place] != own.received[place]:
                self.mismatch = Meeting("other sizes of a part", (each, own_number), (each, own_number))
                return False
        for other, other_number in further:
            second = self.calls[other][other_number]
            reason = None if second is first and not first.sent else difference(first, rank, second, other)
            if reason is not None:
                self.mismatch = Meeting(reason, (rank, number), (other, other_number))
                return False
        return True

    def _pair_of(self, rank: int, call: Issued) -> Hashable:
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
                self.mismatch = Meeting(reason, send, receive)
                return
            for each, i in (send, receive):
                self._end(each, i)
                starting.extend(self._next_messages(each, i))

    def _next_messages(self, rank: int, number: int) -> Iterator[tuple[int, int, Issued]]:
        """The messages of `rank` that begin because its message `number` has ended."""
        pair = self._pairs.get(self._pair_of(rank, self.calls[rank][number]))
        if pair is None:
            return
        pair[0].remove(number)
        if not pair[0]:
            pair.popleft()
            if pair:
                yield from ((rank, each, self.calls[rank][each]) for each in pair[0])

    def _channel(self, rank: int, call: Issued, kind: str | None = None) -> Hashable:
        """The key in `_unmatched` of messages that match in order: with `kind`, of the send's or the receive's side."""
        ends = (rank, call.peer) if call.kind == SEND else (call.peer, rank)
        tag = call.tag if self.rule == "gloo" else 0
        return kind or call.kind, call.group, ends, call.offset, tag

    def _end(self, rank: int, number: int) -> None:
        self.ended[rank][number] = True
        if self._blocked.pop((rank, number), None) is not None:
            self._runnable.append(rank)

    @property
    def has_ended(self) -> bool:
        """Whether every rank came to its end, and every call ended."""
        return self.mismatch is None and all(
            self.position[rank] == len(program.events) and all(self.ended[rank])
            for rank, program in self.programs.items()
        )
