"""Measures how long a process waits for collectives; the training loop of weft.models logs the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Waits:
    """Adds up the time for which this process's device waits for collectives.

    On a GPU the time of the waiting stream, between two events; on a CPU the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, work: dist.Work) -> None:
        """Waits for `work`, and adds the time of the wait."""
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
        """Seconds since the last call. On a GPU the host waits until all recorded waits are over."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


_measuring: list[Waits] = []  # of the `measured_by` blocks, innermost last


@contextmanager
def measured_by(waits: Waits) -> Iterator[None]:
    """Inside, `waits` adds up this process's waits for all collectives. Communication: none."""
    _measuring.append(waits)
    try:
        yield
    finally:
        _measuring.remove(waits)


def wait_for(work: dist.Work | None) -> None:
    """Waits for a collective of this process. All of Weft waits through this function."""
    assert work is not None, "a member of the group gets the work of async_op=True"
    if _measuring:
        _measuring[-1].wait(work)
    else:
        work.wait()
