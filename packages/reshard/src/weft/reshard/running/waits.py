"""How long a process stands still for its collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Waits:
    """The time for which this process's device stood still for collectives, added up from wait to wait.

    On a GPU it is the time of the stream that waits, between two events; on a CPU that of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, work: dist.Work) -> None:
        """Waits for the work, and adds the time that it took."""
        if self._on_gpu:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            work.wait()
            after.record()
            self._events.append((before, after))
        else:
            start = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds since the last call. On a GPU the host waits until all of it has run."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        taken, self._seconds = self._seconds, 0.0
        self._events.clear()
        return taken


_measuring: list[Waits] = []


@contextmanager
def measured_by(waits: Waits) -> Iterator[None]:
    """In it `waits` adds up what every collective of this process is waited for. Communication: none."""
    _measuring.append(waits)
    try:
        yield
    finally:
        _measuring.remove(waits)


def wait_for(work: dist.Work | None) -> None:
    """Waits for a collective that this process has started."""
    assert work is not None, "the process is a member of the group, and asked for the work"
    if _measuring:
        _measuring[-1].wait(work)
    else:
        work.wait()
