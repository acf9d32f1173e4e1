"""`Network`: collectives in time: a queue for each group of ranks, and links shared by the queues."""

from __future__ import annotations

import math
from collections import deque

from .chip import Level

_DUST = 1e-12  # share of the time passed; a job with less left is done


class Job:
    """A collective of a `Network`, queued, under way or done. Changed by the network."""

    __slots__ = ("begin", "end", "group", "level", "links", "module", "name", "remaining", "serial")

    def __init__(self, group: str, name: str, module: str, level: Level | None, seconds: float) -> None:
        self.group, self.name, self.module, self.level = group, name, module, level
        self.links = "" if level is None else level.name
        self.remaining = seconds  # without sharing of links
        self.begin = math.nan  # until under way
        self.end: float | None = None  # None until done
        self.serial = 0  # number of jobs queued before this job


class Network:
    """The collectives of a rank in time, for `timeline.Clocks`.

    Collectives of a group run in turn. Collectives of several groups run at once, and share a level's links equally.
    Times are seconds from the step's beginning, and never decrease from call to call.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[Job] = []  # in the order of their ends
        self.num_added = 0
        self.added: dict[str, float] = {}  # seconds of all jobs queued until now, by group
        self._queues: dict[str, deque[Job]] = {}  # by group; the first job of each is under way
        self._sharing: dict[str, int] = {}  # by name of a level, jobs under way there
        self._share_of_device = 1.0  # share of the device's speed left by the jobs under way

    def add(self, job: Job, ready: float) -> None:
        """Queue a job that can begin at `ready`, after the queued jobs of the group."""
        self.advance(ready)
        job.serial = self.num_added
        self.num_added += 1
        if not job.remaining:
            job.begin = job.end = self.now
            return
        self.added[job.group] = self.added.get(job.group, 0.0) + job.remaining
        queue = self._queues.get(job.group)
        if queue is None:
            self._queues[job.group] = deque((job,))
            self._begin(job, self.now)
        else:
            queue.append(job)

    def advance(self, to: float) -> None:
        """Let jobs run until the time `to`."""
        while self._queues and self.now < to:
            self._step(to)
        self.now = max(self.now, to)

    def finish(self, job: Job) -> float:
        """Let jobs run until `job` is done. Returns the end of `job`."""
        while job.end is None:
            self._step(math.inf)
        return job.end

    def finish_all(self) -> float:
        """Let all jobs run to their end. Returns the end of the last."""
        while self._queues:
            self._step(math.inf)
        return self.now

    def work(self, begin: float, seconds: float) -> float:
        """The end of the device's work from `begin` on, slowed by jobs under way. seconds: without a slowdown."""
        if begin > self.now:
            self.advance(begin)
        while self._queues:
            share = self._share_of_device
            end = begin + seconds / share if share > 0 else math.inf  # the jobs need the whole device
            self._step(end)
            if self.now >= end:
                return end
            seconds -= (self.now - begin) * share
            begin = self.now
        return begin + seconds

    def backlogs(self) -> dict[str, float]:
        """Seconds of the jobs not yet done, by group."""
        return {group: math.fsum(job.remaining for job in queue) for group, queue in self._queues.items()}

    def skip(self, now: float, since: int, added: dict[str, float], done: dict[str, float]) -> None:
        """Jump to the time `now`, past copies of a loop that are not followed.

        since: `num_added` at the beginning of the loop. Jobs of the copies left out are queued before the followed
        copies' jobs, and after all earlier jobs.
        added, done: by group, seconds of jobs queued by the copies left out, and of jobs done meanwhile.
        """
        begin, self.now = self.now, now
        for group, seconds in added.items():
            self.added[group] += seconds
        for group, queue in list(self._queues.items()):
            earlier = [job for job in queue if job.serial < since]
            last = [job for job in queue if job.serial >= since]
            if added.get(group):
                earlier.append(Job(group, "copies left out", "", queue[0].level, added[group]))
            self._sharing[queue[0].links] -= 1
            total = left = done.get(group, 0.0)
            at = begin
            while left > 0 and (ahead := earlier or last):
                job = ahead[0]
                passed = min(left, job.remaining)
                left -= passed
                job.remaining -= passed
                job.begin = at if math.isnan(job.begin) else job.begin
                if job.remaining > _DUST * total:
                    break
                del ahead[0]
                at = begin + (now - begin) * (total - left) / total
                job.remaining, job.end = 0.0, at
                self.done.append(job)
            if earlier or last:
                self._queues[group] = deque([*earlier, *last])
                self._begin(self._queues[group][0], at)
            else:
                del self._queues[group]
        self._set_share()

    def _step(self, to: float) -> None:
        """Let jobs run until a job is done, but not past `to`."""
        first, passed = None, math.inf
        for queue in self._queues.values():
            job = queue[0]
            left = job.remaining * self._sharing[job.links]
            if left < passed:
                first, passed = job, left
        assert first is not None, "called with jobs under way"
        if self.now + passed > to:
            first, passed = None, to - self.now
        for queue in self._queues.values():
            job = queue[0]
            job.remaining -= passed / self._sharing[job.links]
        self.now = to if first is None else self.now + passed
        if first is not None:
            self._end(first)

    def _begin(self, job: Job, at: float) -> None:
        """Note a job as under way; a job not begun before begins at `at`."""
        job.begin = at if math.isnan(job.begin) else job.begin
        self._sharing[job.links] = self._sharing.get(job.links, 0) + 1
        self._set_share()

    def _end(self, job: Job) -> None:
        job.remaining, job.end = 0.0, self.now
        self.done.append(job)
        self._sharing[job.links] -= 1
        queue = self._queues[job.group]
        queue.popleft()
        if queue:
            self._begin(queue[0], self.now)
        else:
            del self._queues[job.group]
            self._set_share()

    def _set_share(self) -> None:
        under_way = (queue[0].level for queue in self._queues.values())
        self._share_of_device = 1 - max((level.slowdown for level in under_way if level is not None), default=0.0)
