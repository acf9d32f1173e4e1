"""Calls timed in turn, so that a disturbance of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

FEWEST, MOST = 3, 200  # rounds that are timed


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def time(self, call: Callable[[], object]) -> float:
        """Seconds until the device has done the call's work."""
        if self._on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def interleaved(calls: Sequence[Callable[[], object]], seconds: float, clock: Clock | None) -> list[list[float]]:
    """The times of each call, in rounds of all calls, for about `seconds`; a first round is not counted.

    clock: None where the calls return their own seconds.
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
