"""`make_program`: a trace as priced operations, with loops over alike blocks and alike microbatches, for `timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from .chip import Chip, Level
from .events import Compute, Event, Segment, Start, Wait
from .price import fuse, seconds_of, transfer

_PART_OF_KIND = {"product": 0, "attention": 1, "memory": 2, "optimizer": 3}  # positions in `timeline.PARTS`


Form = tuple[str, str, int]  # kind, group and bytes of a collective


class PricedEvent(NamedTuple):
    """An event with the price."""

    event: Event
    seconds: float = 0.0  # of the device, or of the links
    host_seconds: float = 0.0
    part: int = -1  # of `Compute`: the position in `timeline.PARTS`
    level: Level | None = None  # of `Start`: the links used
    # Of a `Start` in a copy of a loop and of the `Wait` in a later copy: the form of the collective. Collectives of a
    # form are awaited in the order of their starts.
    ahead: Form | None = None


@dataclass(frozen=True, slots=True)
class PricedSegment:
    """The operations of a segment, in order."""

    operations: tuple[PricedEvent, ...]
    where: str = ""  # as in `timeline.Span`


@dataclass(frozen=True, slots=True)
class Loop:
    """Pieces and inner loops, run `copies` times in order."""

    items: tuple[PricedSegment | Loop, ...]
    copies: int


def make_program(
    segments: Sequence[Segment],
    times: Sequence[int],
    chip: Chip,
    *,
    compiled: bool = False,
    world: int | None = None,
) -> Loop:
    """The program of a rank with all blocks: loops over alike microbatches, with loops over alike blocks inside.

    segments, times: of a `Trace`. compiled, world: as for `time_step`.
    """
    pieces = Pieces(segments, times, chip, compiled=compiled, world=world)
    items: list[PricedSegment | Loop] = []
    for microbatch, group in groupby(segments, lambda segment: segment.microbatch):
        inner = tuple(_loops_over_blocks(list(group), pieces))
        items.append(Loop(inner, times[microbatch] if microbatch >= 0 else 1))
    return Loop(tuple(items), 1)


def _loops_over_blocks(segments: Sequence[Segment], pieces: Pieces) -> Iterator[PricedSegment | Loop]:
    for copies, group in _in_turns(segments):
        yield Loop(tuple(map(pieces.of, group)), copies)


def _in_turns(segments: Iterable[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """Groups of consecutive segments with equally many blocks: (this number, the group). A group repeats as a whole."""
    for (_, copies), group in groupby(segments, lambda each: (each.phase, max(1, len(each.blocks)))):
        yield copies, list(group)


class Pieces:
    """Prices the segments of a trace. Arguments: as for `make_program`."""

    def __init__(
        self,
        segments: Sequence[Segment],
        times: Sequence[int],
        chip: Chip,
        *,
        compiled: bool = False,
        world: int | None = None,
    ) -> None:
        self._chip, self._compiled, self._world = chip, compiled, world
        self._host = 0.0 if compiled else chip.host_seconds
        self._crowding = chip.crowding if (world or 1) > 1 else 1.0
        self._prices: dict[Compute, PricedEvent] = {}
        self._forms = {
            event.number: (event.kind, event.group, event.nbytes)
            for segment in segments
            for event in segment.events
            if isinstance(event, Start)
        }
        self._ahead = set(_forms_ahead(segments, times, self._forms))

    def of(self, segment: Segment) -> PricedSegment:
        events = fuse(segment.events) if self._compiled else segment.events
        where = segment.phase if segment.microbatch < 0 else f"{segment.phase} of microbatch {segment.microbatch}"
        return PricedSegment(tuple(map(self._operation, events)), where)

    def _operation(self, event: Event) -> PricedEvent:
        if isinstance(event, Compute):
            known = self._prices.get(event)
            if known is None:
                part = _PART_OF_KIND[event.kind]
                seconds, host = seconds_of(event, self._chip), event.num_launches * self._host
                known = PricedEvent(event, seconds * self._crowding, host * self._crowding, part)
                self._prices[event] = known
            return known
        if isinstance(event, Start):
            price = transfer(replace(event, number=0, module=""), self._chip, world=self._world)
            host = self._host
            if self._chip.threads is not None:
                host = 0.0 if price.level is None else self._chip.collective_host_seconds * self._crowding
            return PricedEvent(event, price.seconds, host, level=price.level, ahead=self._form_ahead(event.number))
        return PricedEvent(event, ahead=self._form_ahead(event.number))

    def _form_ahead(self, number: int) -> Form | None:
        form = self._forms.get(number)
        return form if form in self._ahead else None


def _forms_ahead(segments: Sequence[Segment], times: Sequence[int], forms: Mapping[int, Form]) -> Iterator[Form]:
    """The forms of collectives started in a copy of a loop and awaited in a later copy."""
    loops = [group for copies, group in _in_turns(segments) if copies > 1]
    for microbatch, group in groupby(segments, lambda segment: segment.microbatch):
        if microbatch >= 0 and times[microbatch] > 1:
            loops.append(list(group))
    for loop in loops:
        inside: set[int] = set()
        left: set[int] = set()
        earlier: set[int] = set()
        for event in (event for segment in loop for event in segment.events):
            if isinstance(event, Start):
                inside.add(event.number)
                left.add(event.number)
            elif isinstance(event, Wait):
                left.discard(event.number)
                if event.number not in inside and event.number in forms:
                    earlier.add(event.number)
        yield from {forms[number] for number in left} & {forms[number] for number in earlier}
