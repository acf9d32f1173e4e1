"""`estimate`: seconds, tokens per second and MFU of a training step on a chip, from a rank's trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..schedules.schedule import Schedule
from .chip import Chip
from .events import Event, Start, Trace
from .pipeline_time import StageBlocks, time_pipeline
from .timeline import Timeline, TimePart, time_step

PIPELINE_AXIS = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted time of a step. Made by `estimate`."""

    seconds: float
    tokens_per_second: float  # over all ranks
    mfu: float  # the model's FLOP/s, divided by the peak FLOP/s of all devices
    parts: dict[TimePart, float]  # `Timeline.parts` of the slowest rank; the sum is `seconds`
    timeline: Timeline

    def share(self, part: TimePart) -> float:
        """A part's seconds, divided by the step's."""
        return self.parts[part] / self.seconds if self.seconds else 0.0


def estimate(
    trace: Trace,
    *,
    chip: Chip,
    mesh_sizes: Mapping[str, int],
    tokens: int,
    flops: float,
    schedule: Schedule | None = None,
    stages: StageBlocks | None = None,
    compiled: bool = False,
    dtype: str = "bfloat16",
    keep_spans: bool = False,
) -> Estimate:
    """Predict the time of a training step on a mesh of the chip's devices.

    trace: of a rank, from `trace_step`; on a mesh with "pp", of a stage.
    mesh_sizes: sizes of all mesh axes by name, outermost first, "pp" included.
    tokens, flops: of the whole step on all ranks; flops without recomputation, as by `flops_per_token`.
    schedule, stages: as for `time_pipeline`; None on a mesh without "pp".
    compiled: whether blocks are compiled; see `time_step`.
    dtype: of products, for the peak in the MFU.
    keep_spans: whether to list spans in `Estimate.timeline`.
    Deterministic. Cost: milliseconds.
    Raises ValueError for a schedule or stages unfit for the mesh, a group larger than the machine, or a dtype without a
    peak.
    """
    world = math.prod(mesh_sizes.values())
    num_stages = mesh_sizes.get(PIPELINE_AXIS, 1)
    if schedule is None or num_stages == 1:
        if num_stages > 1:
            raise ValueError(f"the mesh has {num_stages} ranks along 'pp'; give the schedule of its stages")
        timeline = time_step(trace, chip, compiled=compiled, world=world, keep_spans=keep_spans)
    else:
        if schedule.ranks != num_stages:
            raise ValueError(
                f"schedule {schedule.name!r} has {schedule.ranks} ranks, and the mesh {num_stages} along 'pp'; "
                f"make the schedule for the ranks of the mesh"
            )
        names = list(mesh_sizes)
        stride = math.prod(mesh_sizes[name] for name in names[names.index(PIPELINE_AXIS) + 1 :])
        timeline = time_pipeline(
            _with_stages(trace, stride, num_stages),
            chip,
            schedule,
            stages=stages,
            stride=stride,
            compiled=compiled,
            world=world,
            keep_spans=keep_spans,
        )
    seconds = timeline.seconds
    return Estimate(
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else math.inf,
        mfu=flops / (seconds * world * chip.peak(dtype)) if seconds else 0.0,
        parts=timeline.parts,
        timeline=timeline,
    )


def _with_stages(trace: Trace, stride: int, num_stages: int) -> Trace:
    """The trace with the strides of groups as on the mesh with "pp": along axes outside "pp", ranks are further apart.

    stride: of "pp".
    """
    if stride >= max((e.stride for s in trace.segments for e in s.events if isinstance(e, Start)), default=0) + 1:
        return trace

    def apart(event: Event) -> Event:
        if isinstance(event, Start) and event.stride >= stride:
            return replace(event, stride=event.stride * num_stages)
        return event

    segments = tuple(replace(each, events=tuple(map(apart, each.events))) for each in trace.segments)
    return replace(trace, segments=segments)
