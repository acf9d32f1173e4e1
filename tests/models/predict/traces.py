"""A toy machine, and traces made by hand for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.models.predict.chip import Chip, Level
from weft.models.predict.events import Compute, Event, Segment, Start, Trace, Wait
from weft.models.predict.price import fuse, seconds_of
from weft.models.step.communication import Phase

NVLINK = Level(name="NVLink", ranks=8, bandwidth=100e9, reachable=0.5, latency=1e-6)
NETWORK = Level(name="network", bandwidth=10e9, reachable=1.0, latency=10e-6)
# 132 multiprocessors of 1 TFLOP/s, 1 TB/s, and round numbers elsewhere.
TOY = Chip(
    name="toy",
    peaks={"bfloat16": 132e12, "float32": 66e12},
    reachable=1.0,
    attention_reachable={"forward": 0.5, "backward": 0.25},
    multiprocessors=132,
    tiles=((128, 128),),
    memory_bytes=2**36,
    memory_bandwidth=2e12,
    memory_reachable=0.5,
    levels=(NVLINK, NETWORK),
    host_seconds=0.0,
)


def product(M: int = 1024, N: int = 1024, K: int = 1024, part: Any = "forward", **options: Any) -> Compute:
    sizes = options.pop("sizes", ((1, M, N, K),))
    return Compute(
        name=options.pop("name", "linear"),
        part=part,
        kind="product",
        dtype="bfloat16",
        nbytes=sum(2 * b * (m * k + k * n + m * n) for b, m, n, k in sizes),
        flops=sum(2 * b * m * n * k for b, m, n, k in sizes),
        sizes=sizes,
        **options,
    )


def memory(seconds: float = 1.0, name: str = "rms_norm", **options: Any) -> Compute:
    """Work bounded by memory that takes `seconds` on the toy machine."""
    values: dict[str, Any] = {"part": "forward", "kind": "memory", "dtype": "bfloat16", "nbytes": round(seconds * 1e12)}
    return Compute(name=name, **(values | options))


def start(number: int, seconds: float = 1.0, group: str = "tp", **options: Any) -> Start:
    """An all-gather among 8 ranks of a node that takes `seconds` and 7 messages on the toy machine."""
    values: dict[str, Any] = {"kind": "all-gather", "axes": (group,), "size": 8, "stride": 1}
    return Start(number=number, group=group, **(values | {"nbytes": round(seconds * 50e9)} | options))


def wait(number: int) -> Wait:
    return Wait(number=number)


def segment(*events: Event, phase: Phase = "forward", microbatch: int = 0, blocks: Sequence[int] = ()) -> Segment:
    return Segment(
        phase=phase,
        microbatch=microbatch,
        blocks=tuple(blocks),
        place="block" if blocks else "after",
        events=events,
    )


def trace(*segments: Segment, times: Sequence[int] = (1,), num_blocks: int = 1, message_bytes: int = 0) -> Trace:
    return Trace(segments=segments, num_blocks=num_blocks, times=tuple(times), message_bytes=message_bytes)


def device_seconds(trace: Trace, chip: Chip, *, compiled: bool = False) -> float:
    """Seconds of a device's own work in a step of all blocks, without host, collectives and bubbles.

    A lower bound for a search: no estimate of the trace is less, and none on p ranks of a pipeline is less than a p-th.
    """
    prices: dict[Compute, float] = {}
    total = []
    for segment in trace.segments:
        copies = trace.count(segment)
        for event in fuse(segment.events) if compiled else segment.events:
            if isinstance(event, Compute):
                if event not in prices:
                    prices[event] = seconds_of(event, chip)
                total.append(copies * prices[event])
    return math.fsum(total)
