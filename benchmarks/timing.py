"""Times ways to compute one thing in turn, so that whatever else happens falls on all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

L2_BYTES = (
    256 << 20
)  # written before each call, so that it finds its operands in device memory: five times an H200's L2
# Seconds; where a call takes fewer by events, kernels of 50 µs may be waiting for the host, which needs hundreds of µs for a
# loss and its gradient.
QUICK = 1e-3

Way = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a call, of each round, in order. timer: "events", "graph" or "host"."""

    seconds: tuple[float, ...]
    timer: str = "host"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def figures(self) -> dict[str, float | str]:
        """Median, 20th and 80th percentile, and the timer."""
        fifths = statistics.quantiles(self.seconds, n=5, method="inclusive")
        seconds = {"seconds_median": self.median, "seconds_p20": fifths[0], "seconds_p80": fifths[3]}
        return {**seconds, "timer": self.timer}


class Clock(Protocol):
    """Times a call. timers: its name, and that of a call that it replayed."""

    timers: tuple[str, str]

    def __call__(self, way: Way) -> Callable[[], float]:
        """Runs the way; what is returned waits for it and tells the seconds."""

    def replay(self, way: Way, calls: int) -> Way | None:
        """One call that is `calls` calls of the way, with less around them; None where that cannot be had."""


class Device:
    """The clock of a GPU: CUDA events around a call with a cold L2. The host does not wait between calls."""

    timers = "events", "graph"

    def __init__(self) -> None:
        self._other = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, way: Way) -> Callable[[], float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._other.zero_()
        start.record()
        way()
        stop.record()

        def seconds() -> float:
            stop.synchronize()
            return start.elapsed_time(stop) / 1e3

        return seconds

    def replay(self, way: Way, calls: int) -> Way | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    way()
        except RuntimeError:  # it waits for the device, which a graph cannot
            torch.cuda.synchronize()
            return None
        return graph.replay


class Host:
    """The clock of the host: of what a CPU does, and of no kernel's speed."""

    timers = "host", "host"

    def __call__(self, way: Way) -> Callable[[], float]:
        start = time.perf_counter()
        way()
        took = time.perf_counter() - start
        return lambda: took

    def replay(self, way: Way, calls: int) -> Way:
        def all_of_them() -> None:
            for _ in range(calls):
                way()

        return all_of_them


def sets_for(nbytes: int) -> int:
    """How many sets of operands of that size are more than the L2 holds: ways that take them in turn find none there."""
    return math.ceil(L2_BYTES / max(nbytes, 1))


def in_turn(
    ways: Mapping[str, Way], clock: Clock, *, rounds: int = 20, warmup: int = 3, calls: int = 1
) -> dict[str, Timed]:
    """Each way once a round; the warmup rounds, in which kernels are compiled and memory is found, are not kept.

    calls: in a round, of a way that needs less than 1 ms for one; on a GPU they are a CUDA graph, and each should find
    other operands: see `sets_for`.
    """
    warm = {name: [clock(way)() for _ in range(warmup)][-1] for name, way in ways.items()}
    replayed = {name: clock.replay(way, calls) if warm[name] < QUICK else None for name, way in ways.items()}
    running: dict[str, list[Callable[[], float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            running[name].append(clock(replayed[name] or way))
    found = {}
    for name, seconds in running.items():
        count, timer = (calls, clock.timers[1]) if replayed[name] else (1, clock.timers[0])
        found[name] = Timed(tuple(each() / count for each in seconds), timer)
    return found


def ceilings() -> dict[str, float]:
    """What this GPU can do at the most: bytes read and written a second in a copy, flop a second in a bf16 matmul."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_(generator=_generator())
    target = torch.empty_like(source)
    side = 8192
    left, right = (torch.randn(side, side, device="cuda", generator=_generator()).bfloat16() for _ in range(2))
    ways: dict[str, Way] = {"copy": lambda: target.copy_(source), "matmul": lambda: left @ right}
    timed = in_turn(ways, Device())
    return {
        "copy_bytes_per_second": 2 * source.nbytes / timed["copy"].median,
        "bf16_flop_per_second": 2 * side**3 / timed["matmul"].median,
    }


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)
