"""Times ways to compute one thing in turn, so that whatever else happens falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

L2_BYTES = (
    256 << 20
)  # written before each call, so that it finds its operands in device memory: five times an H200's L2


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of each call, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20th and the 80th percentile."""
        fifths = statistics.quantiles(self.seconds, n=5, method="inclusive")
        return fifths[0], fifths[3]


class Clock(Protocol):
    """Times one call."""

    def __call__(self, way: Callable[[], object]) -> Callable[[], float]:
        """Runs the way; what is returned waits for it and tells the seconds."""


class Device:
    """The clock of a GPU: CUDA events around a call with a cold L2. The host does not wait between calls."""

    def __init__(self) -> None:
        self._other = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, way: Callable[[], object]) -> Callable[[], float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._other.zero_()
        start.record()
        way()
        stop.record()

        def seconds() -> float:
            stop.synchronize()
            return start.elapsed_time(stop) / 1e3

        return seconds


def host(way: Callable[[], object]) -> Callable[[], float]:
    """The clock of the host: of what a CPU does, and of no kernel's speed."""
    start = time.perf_counter()
    way()
    took = time.perf_counter() - start
    return lambda: took


def in_turn(
    ways: Mapping[str, Callable[[], object]], clock: Clock, *, rounds: int = 20, warmup: int = 3
) -> dict[str, Timed]:
    """Each way once a round; the warmup rounds, in which kernels are compiled and memory is found, are not kept."""
    for _ in range(warmup):
        for way in ways.values():
            clock(way)()
    running: dict[str, list[Callable[[], float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            running[name].append(clock(way))
    return {name: Timed(tuple(seconds() for seconds in calls)) for name, calls in running.items()}
