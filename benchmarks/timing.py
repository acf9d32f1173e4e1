"""Times several ways to compute the same thing in turn, so that other load on the machine slows all ways alike."""

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

# The size of the memory overwritten before each call, so that operands come from device memory: five times an H200's
# L2.
L2_BYTES = 256 << 20
# Seconds. A shorter call, timed by events, may include waits for the host: the host needs hundreds of µs for a loss
# and the gradient, and kernels may take 50 µs. Calls near this limit would be timed sometimes by events and sometimes
# by graph, so the limit is far from the 1.0 ms of the largest timed logits.
QUICK = 2e-3

Way = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of a way, a time for each round."""

    seconds: tuple[float, ...]  # of a call, in the order of the rounds
    # "graph": a GPU replayed a graph of calls. "events": the time may include waits for the host. "host": host time.
    timer: str = "host"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def shortest(self) -> float:
        return min(self.seconds)

    @property
    def figures(self) -> dict[str, float | str]:
        """The median, the 20th and the 80th percentile, and the timer."""
        fifths = statistics.quantiles(self.seconds, n=5, method="inclusive")
        seconds = {"seconds_median": self.median, "seconds_p20": fifths[0], "seconds_p80": fifths[3]}
        return {**seconds, "timer": self.timer}


class Clock(Protocol):
    """Times a call."""

    timers: tuple[str, str]  # the names of the timer for a call, and for a replay

    def __call__(self, way: Way) -> Callable[[], float]:
        """Runs the way. The returned function waits for the end of the call and returns the seconds."""

    def replay(self, way: Way, calls: int) -> Way | None:
        """A function which runs `calls` calls of the way with less overhead; None if that is not possible."""


class Device:
    """The clock of a GPU: CUDA events around a call, with a cold L2 cache. The host does not wait between calls."""

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
        """Captures the calls as a CUDA graph. Outputs are kept until all calls are captured, so calls share no memory.

        After a failed capture no further capture is tried, because torch 2.11 keeps the memory of the failed capture.
        """
        if not self._captures:
            return None
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                made = [way() for _ in range(calls)]
        except Exception as error:  # the way waits for the device, or memory is short
            self._captures = False
            torch.cuda.set_stream(stream)  # torch.cuda.graph restores the stream only after a success
            torch.cuda.synchronize()
            first = error.__context__ or error  # the end of a failed capture fails, too
            told = f"{type(first).__name__}: {first}".splitlines()[0]
            warnings.warn(
                f"a CUDA graph could not be captured ({told}): times include waits for the host", stacklevel=2
            )
            return None
        del made
        return graph.replay


class Host:
    """The clock of the host, for work of a CPU. It does not measure kernels on a GPU."""

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
    """The clock of this process's CPU time, which stops while other programs use the cores."""

    now = staticmethod(time.process_time)


def sets_for(nbytes: int) -> int:
    """The number of sets of operands, each of `nbytes`, which together exceed the L2.

    A way which takes the sets in turn finds no operand in the L2.
    """
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
    """Times each way once in every round. Warmup rounds, which compile kernels and allocate memory, are not counted.

    calls: the calls of a way in a round, if a call of any way takes less than QUICK. On a GPU these calls are a CUDA
        graph, and each should use different operands: see `sets_for`.
    replayed: the ways which may be replayed as a graph; None: all. A way which waits for the device may not be
        replayed, and is called once a round.
    guard: a context around the calls of a way. If the context swallows an error, the way is left out of the result.
    """
    warm: dict[str, float] = {}
    for name, way in ways.items():
        with guard(name):
            warm[name] = [clock(way)() for _ in range(warmup)][-1]
    several = [name for name in warm if replayed is None or name in replayed]
    replays: dict[str, Way | None] = {}
    if any(warm[name] < QUICK for name in several):  # replay all ways, so that all are timed alike
        replays = {name: clock.replay(ways[name], calls) for name in several}
        # Warm up again: a capture empties the allocator's cache, and a first replay copies the graph to the device.
        again: dict[str, float] = {}
        for name in warm:
            with guard(name):
                again[name] = clock(replays.get(name) or ways[name])()
        warm = again
    running: dict[str, list[Callable[[], float]]] = {name: [] for name in warm}
    for number, order in enumerate(orders(list(warm), rounds)):
        for name in order:
            if len(running[name]) == number:  # a way with fewer times has failed
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
    """Yields the order of the names in each round. In all, each name follows each other name about equally often.

    The order is a zigzag over the n names, which starts one name later in each round, and is reversed in every second
    group of n rounds (Williams 1949).
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(len(names))]  # 0, 1, -1, 2, -2, …
    for number in range(rounds):
        ahead = zigzag if number // max(1, len(names)) % 2 == 0 else zigzag[::-1]
        yield [names[(number + place) % len(names)] for place in ahead]


def ceilings() -> dict[str, float]:
    """Measures this GPU's ceilings: bytes read and written per second by a copy, flop per second of a bf16 matmul."""
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


def describe_gpu() -> str:
    """The GPU and the versions of torch and Triton, as tables of measurements record them.

    Raises RuntimeError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to measure on; run this on a machine with a GPU")
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
