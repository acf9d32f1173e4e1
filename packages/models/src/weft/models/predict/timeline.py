"""`time_step`: simulates a trace on three kinds of clocks: the device, a stream for each group of ranks, the host.

Alike blocks are the copies of a loop, as are alike microbatches. Copies are simulated one by one until two copies in a
row take equally long. The following copies are added at once, each with that time. The final copy is simulated again,
as are copies from which on the host's lead, or a backlog of collectives, would be used up.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from .chip import Chip
from .events import Compute, Start, Trace
from .network import Job, Network
from .program import Form, Loop, PricedEvent, PricedSegment, make_program

TimePart = Literal["products", "attention", "memory_bound", "optimizer", "communication", "bubble", "host"]
PARTS: tuple[TimePart, ...] = ("products", "attention", "memory_bound", "optimizer", "communication", "bubble", "host")
DEVICE = "device"  # the stream of the device's work

_COMMUNICATION, _HOST = PARTS.index("communication"), PARTS.index("host")
_FOLLOWED = 32  # copies of a loop to simulate one by one at most; then the loop counts as steady in any case
_STEADY = 1e-6  # relative difference in seconds below which two copies are alike


class Span(NamedTuple):
    """Work of a stream from `begin` to `end`, in seconds from the step's beginning."""

    stream: str  # DEVICE, the name of a group of ranks, or a rank of a pipeline as "pp=0"
    # Of an op and its part, of a collective, or of an action of a pipeline's schedule; for a rank of a pipeline also
    # "parameters", "gradients" and "optimizer".
    name: str
    module: str  # of the op; of an action the stage, as "stage 0"
    where: str  # phase and microbatch, as "forward of microbatch 0"; "" for collectives and actions
    part: TimePart
    begin: float
    end: float


class Repeated(NamedTuple):
    """A time from `begin` to `end` in which `copies` more copies of the preceding work run, without spans."""

    copies: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times of a rank's step, made by `time_step`, or of a pipeline's step, made by `time_pipeline`."""

    seconds: float  # the sum of `parts`
    # Seconds of the device by work or reason to wait; hidden communication does not count. In a pipeline, of the rank
    # whose gradients are ready last, with the update of the slowest rank.
    parts: dict[TimePart, float]
    spans: tuple[Span, ...] = ()  # where asked for
    repeated: tuple[Repeated, ...] = ()

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams of the spans, by first appearance."""
        return tuple(dict.fromkeys(span.stream for span in self.spans))


def time_step(
    trace: Trace,
    chip: Chip,
    *,
    compiled: bool = False,
    world: int | None = None,
    keep_spans: bool = False,
    expand: bool = False,
) -> Timeline:
    """The timeline of a rank that runs all blocks of the trace.

    On a GPU the host issues ops ahead of the device. Issuing takes `chip.host_seconds` for an op, and the device idles
    where the host is behind. On a CPU (`chip.threads`) the host computes: an op takes `chip.host_seconds` and then the
    op's own seconds. Ranks reach a collective at different moments, so a wait for a collective ends later by
    `Chip.drift` times the square root of the seconds since the rank's last wait.
    A collective starts after all work issued earlier, and after earlier collectives of the group. Collectives of
    several groups share the links of a level. While links carry bytes, the device is slower by the level's `slowdown`.
    compiled: whether torch's own ops are fused and the host takes no time: see `price.fuse`.
    world: ranks in the run. A run within a level of links uses no outer level (`Chip.levels_of`), and in a run of
        several ranks computing takes longer (`Chip.crowding`). None: all levels may be used, and computing takes as
        long as on one rank.
    keep_spans: whether to list the spans of the copies simulated one by one.
    expand: whether to simulate every copy of a loop.
    """
    clocks = Clocks(chip, compiled=compiled, keep_spans=keep_spans, expand=expand)
    clocks.run(make_program(trace.segments, trace.times, chip, compiled=compiled, world=world))
    clocks.finish()
    return clocks.timeline()


@dataclass(frozen=True, slots=True)
class _ClockState:
    """The state of `Clocks` between two copies of a loop."""

    device: float
    host: float
    links: float  # `Network.now`
    backlogs: dict[str, float]  # seconds of collectives not yet done, by group
    added: dict[str, float]  # seconds of all collectives queued until now, by group
    # By form of collective (`program.Form`), of the collectives which only a later copy of a loop awaits: how many are
    # started and not yet awaited, how many were awaited until now, and `Job.serial` of the one awaited next.
    ahead: dict[Form, int]
    awaited: dict[Form, int]
    oldest: dict[Form, int]
    parts: list[float]


class Clocks:
    """Runs a program (`make_program`) in time, for `time_step` and `time_pipeline`. Options: as for `time_step`."""

    def __init__(self, chip: Chip, *, compiled: bool = False, keep_spans: bool = False, expand: bool = False) -> None:
        self.device = 0.0  # seconds until the device has done all operations up to now
        self._host = 0.0  # seconds until the host has issued all operations up to now
        self._drift, self._met = chip.drift, 0.0  # when this rank last met the ranks of a group
        self._is_cpu, self._compiled, self._keep, self._expand = chip.threads is not None, compiled, keep_spans, expand
        self._parts = [0.0] * len(PARTS)
        self._network = Network()
        self._jobs: dict[int, Job] = {}  # by number of the collective, the job last started
        self._ahead: dict[Form, deque[Job]] = {}  # by `PricedEvent.ahead`, jobs not yet awaited
        self._awaited: Counter[Form] = Counter()  # by `PricedEvent.ahead`, the number of jobs awaited
        self._where = ""
        self._spans: list[Span] = []
        self._repeated: list[Repeated] = []

    def run(self, program: Loop | PricedSegment) -> None:
        """Run a program after all earlier programs."""
        if isinstance(program, PricedSegment):
            self._where = program.where
            for operation in program.operations:
                self._perform(operation)
        elif program.copies == 1:
            for item in program.items:
                self.run(item)
        else:
            self._repeat(program)

    def finish(self) -> None:
        """Wait for the host and for all running collectives. Called after the last program."""
        if self._host > self.device and not self._is_cpu:
            self._idle(self._host, _HOST)
        self._network.advance(self.device)
        end = self._network.finish_all()
        if end > self.device:
            self._idle(end, _COMMUNICATION)

    def timeline(self) -> Timeline:
        """The timeline of all programs run."""
        parts = dict(zip(PARTS, self._parts, strict=True))
        jobs = [(job, job.end or job.begin) for job in self._network.done] if self._keep else []
        of_groups = [Span(job.group, job.name, job.module, "", "communication", job.begin, end) for job, end in jobs]
        return Timeline(
            seconds=math.fsum(parts.values()),
            parts=parts,
            spans=(*self._spans, *of_groups),
            repeated=tuple(self._repeated),
        )

    # -- operations

    def _perform(self, operation: PricedEvent) -> None:
        event = operation.event
        if isinstance(event, Compute):
            self._compute(operation, event)
        elif isinstance(event, Start):
            self._start(operation, event)
        else:
            waiting = self._ahead.get(operation.ahead) if operation.ahead else None
            if operation.ahead and waiting:
                self._awaited[operation.ahead] += 1
            job = waiting.popleft() if waiting else self._jobs.get(event.number)
            if job is not None:
                end = self._network.finish(job)
                if job.level is not None:
                    end += self._drift * math.sqrt(self.device - self._met)
                if end > self.device:
                    self._idle(end, _COMMUNICATION)
                self._met = self.device

    def _compute(self, operation: PricedEvent, event: Compute) -> None:
        self._issue(operation.host_seconds)
        begin = self.device
        self.device = end = self._network.work(begin, operation.seconds)
        self._parts[operation.part] += end - begin
        if self._keep:
            name = event.name if event.part == "forward" else f"{event.name} {event.part}"
            self._spans.append(Span(DEVICE, name, event.module, self._where, PARTS[operation.part], begin, end))

    def _start(self, operation: PricedEvent, event: Start) -> None:
        if self._is_cpu:
            self._issue(operation.host_seconds)
            ready = self.device
        else:
            self._host += operation.host_seconds
            ready = max(self.device, self._host)
        name = f"{event.kind} over {', '.join(event.axes) or event.size}"
        job = Job(event.group, name, event.module, operation.level, operation.seconds)
        self._network.add(job, ready)
        self._jobs[event.number] = job
        if operation.ahead:
            self._ahead.setdefault(operation.ahead, deque()).append(job)

    def _issue(self, seconds: float) -> None:
        """Let the host issue an op. A device that has finished all earlier work idles until the op is issued."""
        if self._is_cpu:
            self._idle(self.device + seconds, _HOST)
            return
        self._host += seconds
        if self._host > self.device:
            self._idle(self._host, _HOST)

    def _idle(self, until: float, part: int) -> None:
        self._parts[part] += until - self.device
        self.device = until

    # -- loops

    def _repeat(self, loop: Loop) -> None:
        """Simulate the copies of a loop. Once the loop is steady, add all copies but the loop's final one at once."""
        copies = loop.copies
        done, followed = 0, 0
        states = [self._state()]
        since = self._network.num_added
        while done < copies:
            for item in loop.items:
                self.run(item)
            done, followed = done + 1, followed + 1
            if self._expand:
                continue
            states = [*states[-2:], self._state()]
            if copies - done > 1 and len(states) == 3 and (_is_steady(states, since) or followed >= _FOLLOWED):
                skipped = self._jump(states, copies - done - 1, since)
                if skipped:
                    done, followed = done + skipped, 0
                    states = [self._state()]

    def _state(self) -> _ClockState:
        self._network.advance(self.device)
        return _ClockState(
            self.device,
            self._host,
            self._network.now,
            self._network.backlogs(),
            dict(self._network.added),
            {form: len(jobs) for form, jobs in self._ahead.items() if jobs},
            dict(self._awaited),
            {form: jobs[0].serial for form, jobs in self._ahead.items() if jobs},
            list(self._parts),
        )

    def _jump(self, states: Sequence[_ClockState], most: int, since: int) -> int:
        """Add up to `most` copies like the latest copy, without simulating them. Returns their number.

        Stops before the copy in which the host's lead over the device, or a group's backlog, would shrink to nothing.
        """
        before, after = states[-2:]
        copies = most
        if not self._compiled and not self._is_cpu:
            copies = min(copies, _copies_until_none(before.device - before.host, after.device - after.host))
        for group in {*before.backlogs, *after.backlogs}:
            earlier, later = before.backlogs.get(group, 0.0), after.backlogs.get(group, 0.0)
            copies = min(copies, _copies_until_none(earlier, later))
        if copies < 1:
            return 0
        begin = self.device
        self.device += copies * (after.device - before.device)
        self._met += copies * (after.device - before.device)
        self._host += copies * (after.host - before.host)
        self._parts = [b + copies * (b - a) for a, b in zip(before.parts, after.parts, strict=True)]
        added = {group: copies * (each - before.added.get(group, 0.0)) for group, each in after.added.items()}
        done = {
            group: each - copies * (after.backlogs.get(group, 0.0) - before.backlogs.get(group, 0.0))
            for group, each in added.items()
        }
        self._network.skip(after.links + copies * (after.links - before.links), since, added, done)
        self._repeated.append(Repeated(copies, begin, self.device))
        return copies


def _is_steady(states: Sequence[_ClockState], since: int) -> bool:
    """Whether the last two copies took equally long, and changed each group's backlog by the same amount.

    False also where a copy does not start as many collectives for later copies as it awaits of earlier copies: copies
    would then wait for different collectives. If copies await collectives of earlier copies, False also where
    - the collective awaited next was started before the loop: later waits may be longer;
    - or the backlog of the collective's group grows: each wait will be longer than the wait before.
    since: `Network.num_added` at the beginning of the loop.
    """
    if not states[0].ahead == states[1].ahead == states[2].ahead:
        return False
    before, after = states[-2:]
    awaited = [form for form, count in after.awaited.items() if count > before.awaited.get(form, 0)]
    if any(after.oldest.get(form, since) < since for form in awaited):
        return False
    lasted, lasts = (after.device - before.device for before, after in pairwise(states))
    allowed = _STEADY * max(lasted, lasts)
    if abs(lasts - lasted) > allowed:
        return False
    groups = {*states[0].backlogs, *states[1].backlogs, *states[2].backlogs}
    growing = {group: after.backlogs.get(group, 0.0) - before.backlogs.get(group, 0.0) for group in groups}
    if any(growing.get(group, 0.0) > allowed for _, group, _ in awaited):
        return False
    of_groups = ([state.backlogs.get(group, 0.0) for state in states] for group in groups)
    return all(abs(first - 2 * second + third) <= allowed for first, second, third in of_groups)


def _copies_until_none(before: float, after: float) -> int:
    """How many more copies fit before a quantity is used up, if each lowers it as the latest copy did."""
    lost = before - after
    if lost <= _STEADY * max(before, 1e-12):
        return 2**62
    return max(0, math.floor(after / lost) - 1)
