"""`interleaved`: times several calls in turn, to spread a disturbance of the machine over all calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

FEWEST, MOST = 3, 200  # timed rounds
SHORT = 5e-3  # seconds of a call below which operands in the caches matter


class Clock:
    """Times calls on a device, GPU or CPU.

    A CPU's call with a single thread counts the seconds of this thread on a core. Time of other programs on the core
    does not count, except through the caches: the call must read operands again which these programs evicted.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        is_single = not self._on_gpu and torch.get_num_threads() == 1
        self._now = time.thread_time if is_single else time.perf_counter

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of the call, until the device has done all work.

        call: must wait for no other process, because a CPU's single thread would not count the wait.
        """
        if self._on_gpu:
            torch.cuda.synchronize()
        start = self._now()
        call()
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._now() - start


def interleaved(
    calls: Sequence[Callable[[], object]], seconds: float, clock: Clock | None, *, warm: bool = False
) -> list[list[float]]:
    """Run rounds of all calls for about `seconds`; return each call's times in seconds. A first round is not timed.

    clock: None for calls that return their own seconds.
    warm: whether an untimed call comes before each short call. Operands and code are then in the caches, as in a step,
        where the op before has just made the operands.
    """

    def seconds_of(call: Callable[[], object]) -> float:
        return clock.time(call) if clock is not None else float(call())  # type: ignore[arg-type]

    found: list[list[float]] = [[] for _ in calls]
    start = time.monotonic()
    for turn in range(MOST + 1):
        began = time.monotonic()
        for times, call in zip(found, calls, strict=True):
            duration = seconds_of(call)
            if warm and turn and duration < SHORT:
                duration = seconds_of(call)
            if turn:
                times.append(duration)
        now = time.monotonic()
        if turn >= FEWEST and now - start + (now - began) > seconds:
            break
    return found
