"""`interleaved`: times several calls in turn, to spread a disturbance of the machine over all calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

FEWEST, MOST = 3, 200  # timed rounds


class Clock:
    """Times calls on a device, GPU or CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of the call, until the device has done all work."""
        if self._on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def interleaved(calls: Sequence[Callable[[], object]], seconds: float, clock: Clock | None) -> list[list[float]]:
    """Run rounds of all calls for about `seconds`; return each call's times in seconds. A first round is not timed.

    clock: None for calls that return their own seconds.
    """
    found: list[list[float]] = [[] for _ in calls]
    start = time.monotonic()
    for turn in range(MOST + 1):
        began = time.monotonic()
        for times, call in zip(found, calls, strict=True):
            duration = call() if clock is None else clock.time(call)
            if turn:
                times.append(float(duration))  # type: ignore[arg-type]
        now = time.monotonic()
        if turn >= FEWEST and now - start + (now - began) > seconds:
            break
    return found
