"""Waiting for collectives, and for messages between pipeline stages.

`measure_waits` adds up the waits made by `wait_for`; the training loop of weft.models logs the sum. Products that
overlap with their collectives wait without `wait_for`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


class WaitTimer:
    """The time for which this process's device waits for collectives and for messages between pipeline stages, added up
    over calls of `wait`.

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

    def pop_seconds(self) -> float:
        """Seconds waited since the last call. On a GPU the host waits until all recorded waits are over."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


_measuring: list[WaitTimer] = []  # timers of the running `measure_waits` blocks, innermost last


@contextmanager
def measure_waits(timer: WaitTimer) -> Iterator[None]:
    """Context manager: in the block, `timer` adds up the time of `wait_for` calls. Communication: none.

    In nested blocks only the innermost timer counts.
    """
    _measuring.append(timer)
    try:
        yield
    finally:
        _measuring.remove(timer)


def wait_for(work: dist.Work | None, seconds: float | None = None) -> None:
    """Waits for a collective, or a message between pipeline stages, and measures the wait inside `measure_waits`.

    seconds: to wait at most, on the host; RuntimeError after that time. Such a wait is not measured.
        None: waits up to the group's timeout, and the wait is measured. On a GPU the stream waits, and the call returns
        at once; NCCL's watchdog then ends the process after the timeout.
    """
    assert work is not None, "None comes only to a rank outside the group, or without async_op=True"
    if seconds is not None:
        work.wait(timedelta(seconds=seconds))
    elif _measuring:
        _measuring[-1].wait(work)
    else:
        work.wait()
