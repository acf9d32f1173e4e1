"""Times ways to compute one thing in turn, so that whatever else happens falls on all of them alike."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

# Written before each call, so that it finds its operands in device memory: five times an H200's L2.
L2_BYTES = 256 << 20
# Seconds; where a call takes fewer by events, kernels of 50 µs may be waiting for the host, which needs hundreds of µs for a
# loss and its gradient. Far from the 1.0 ms of the largest logits that are timed: what is near it is timed now so, now so.
QUICK = 2e-3

Way = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a call, of each round, in order.

    timer: "graph" where a GPU replayed the calls, "events" where it may have waited for the host between kernels, "host".
    """

    seconds: tuple[float, ...]
    timer: str = "host"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def shortest(self) -> float:
        return min(self.seconds)

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
        self._captures = True

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
        """As a CUDA graph. Each call writes memory of its own: what it makes is kept until all are captured.

        After a capture that failed none is tried again: torch 2.11 leaves its memory to that one.
        """
        if not self._captures:
            return None
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                made = [way() for _ in range(calls)]
        except Exception as error:  # it waits for the device, which a graph cannot, or there is no memory
            self._captures = False
            torch.cuda.set_stream(stream)  # torch.cuda.graph restores it where the capture ends well
            torch.cuda.synchronize()
            first = error.__context__ or error  # the end of the capture fails, too
            told = f"{type(first).__name__}: {first}".splitlines()[0]
            warnings.warn(
                f"a CUDA graph could not be captured ({told}): times include waits for the host", stacklevel=2
            )
            return None
        del made
        return graph.replay


class Host:
    """The clock of the host: of what a CPU does, and of no kernel's speed."""

    timers = "host", "host"
    now = staticmethod(time.perf_counter)

    def __call__(self, way: Way) -> Callable[[], float]:
        start = self.now()
        way()
        took = self.now() - start
        return lambda: took

    def replay(self, way: Way, calls: int) -> Way:
        def all_of_them() -> None:
            for _ in range(calls):
                way()

        return all_of_them


class Processor(Host):
    """The clock of this process' CPU time, which stands still while other programs have the cores."""

    now = staticmethod(time.process_time)


def sets_for(nbytes: int) -> int:
    """How many sets of operands of that size are more than the L2 holds: ways that take them in turn find none there."""
    return math.ceil(L2_BYTES / max(nbytes, 1))


def in_turn(
    ways: Mapping[str, Way],
    clock: Clock,
    *,
    rounds: int = 20,
    warmup: int = 3,
    calls: int = 1,
    replayed: Collection[str] | None = None,
    guard: Callable[[str], AbstractContextManager[None]] = lambda way: nullcontext(),
) -> dict[str, Timed]:
    """Each way once a round; the warmup rounds, in which kernels are compiled and memory is found, are not kept.

    calls: in a round, where one of the ways needs less than 2 ms for one; on a GPU they are a CUDA graph, and each should
        find other operands: see `sets_for`.
    replayed: the ways that may be that; without it all. One that waits for the device may not, and is called once.
    guard: what the calls of a way stand in. Where it swallows what a way raises, that way is not among those returned.
    """
    warm: dict[str, float] = {}
    for name, way in ways.items():
        with guard(name):
            warm[name] = [clock(way)() for _ in range(warmup)][-1]
    several = [name for name in warm if replayed is None or name in replayed]
    replays: dict[str, Way | None] = {}
    if any(warm[name] < QUICK for name in several):  # all of them, so that they are timed alike
        replays = {name: clock.replay(ways[name], calls) for name in several}
        # Once more: a capture empties the allocator's cache, a first replay brings the graph to the device.
        again: dict[str, float] = {}
        for name in warm:
            with guard(name):
                again[name] = clock(replays.get(name) or ways[name])()
        warm = again
    running: dict[str, list[Callable[[], float]]] = {name: [] for name in warm}
    for number, order in enumerate(orders(list(warm), rounds)):
        for name in order:
            if len(running[name]) == number:  # otherwise it has failed
                with guard(name):
                    running[name].append(clock(replays.get(name) or ways[name]))
    found = {}
    for name, seconds in running.items():
        if len(seconds) == rounds:
            count, timer = (calls, clock.timers[1]) if replays.get(name) else (1, clock.timers[0])
            with guard(name):
                found[name] = Timed(tuple(each() / count for each in seconds), timer)
    return found


def orders(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round, such that each name follows each other about equally often.

    A zigzag of places, which begins one further in each round, and goes back in every other n of them (Williams 1949).
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(len(names))]  # 0, 1, -1, 2, -2, …
    for number in range(rounds):
        ahead = zigzag if number // max(1, len(names)) % 2 == 0 else zigzag[::-1]
        yield [names[(number + place) % len(names)] for place in ahead]


def ceilings() -> dict[str, float]:
    """What this GPU can do at the most: bytes read and written a second in a copy, flop a second in a bf16 matmul."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_(generator=_generator())
    target = torch.empty_like(source)
    side = 8192
    left, right = (torch.randn(side, side, device="cuda", generator=_generator()).bfloat16() for _ in range(2))
    ways: dict[str, Way] = {"copy": lambda: target.copy_(source), "matmul": lambda: left @ right}
    timed = in_turn(ways, Device(), replayed=())
    return {
        "copy_bytes_per_second": 2 * source.nbytes / timed["copy"].median,
        "bf16_flop_per_second": 2 * side**3 / timed["matmul"].median,
    }


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)
