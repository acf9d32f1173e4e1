"""`trace_step`: a rank's training step as a `Trace`, from a run on shapes.

Weft's ops are placed by `observing`, further ops of torch by a dispatch mode, collectives and waits by the recording's
listener. Blocks that are alike, and microbatches, run a few times and stand for all: the cost grows neither with the
mesh nor with the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from torch import Tensor, nn
from weft.kernels.extension import observing
from weft.mesh import ProcessMesh

from ..parallel import ParallelPlan
from ..parallel.pipeline.run import stage_mesh_of
from ..parallel.plan import without_pipeline
from ..parallel.styles import PIPELINE_AXIS
from ..step.record import StepShape, meta_copy, on_shapes
from .alike import Standing, block_names, keep_standing_blocks
from .events import Compute, Event, Phase, Segment, Start, Trace, Wait
from .observer import Observer, Place, Placed

GATHERED_AHEAD = 2  # blocks whose parameters are being gathered while a block computes, under zero=3
RUN_MICROBATCHES = 3  # the first, which makes gradients, one for all in between, and the last, whose gradients are sent


def trace_step(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan,
    shape: StepShape,
    *,
    clip_norm: float | None = None,
    update: Callable[[nn.Module], None] | None = None,
    states: Mapping[str, int] | int = 2,
) -> Trace:
    """The trace of `shape.rank` in a training step of `model` on `mesh` under `plan`.

    model, mesh, plan, shape, clip_norm, update: as for `run_on_shapes`. states: the optimizer's tensors for each
    element of a parameter, as for `predict_memory`.
    On a mesh with "pp" the step is of the mesh without that axis, of one stage that has all blocks: `Segment.blocks`
    says which stage's each segment is. Parameters are then gathered once for all microbatches, also under zero=3.
    Communication: none. Raises ValueError as `record`.
    """
    count = max(1, shape.microbatches)
    is_stage = PIPELINE_AXIS in mesh.axis_names and mesh.axis_size(PIPELINE_AXIS) > 1
    if PIPELINE_AXIS in mesh.axis_names:
        if count == 1 and plan.pipeline is not None:
            count = plan.pipeline.microbatches
        mesh, plan = stage_mesh_of(mesh, 0), without_pipeline(plan)
        shape = replace(shape, rank=mesh.rank_at(**dict.fromkeys(mesh.axis_names, 0)))
    if is_stage:
        plan = replace(plan, zero=2 if plan.zero == 3 else plan.zero)
    times = (1,) * count if count <= RUN_MICROBATCHES else (1, count - 2, 1)
    if count > 1:
        rows, *sizes = shape.batch
        assert not isinstance(rows, Tensor), "tensors are not divided into microbatches"
        shape = replace(shape, batch=(rows // count * len(times), *sizes), microbatches=len(times))
    model = meta_copy(model)
    names = block_names(model, plan)
    standing = keep_standing_blocks(model, names, GATHERED_AHEAD if plan.zero == 3 else 1)
    prefix = names[0].rpartition(".")[0] if names else ""
    bucket_bytes, shape = shape.bucket_bytes, replace(shape, bucket_bytes=1)  # no bucket spans two blocks
    with on_shapes(model, mesh, plan, shape) as ready:
        assert ready is not None, "a mesh without stages has every rank's step"
        ready.run(lambda phase: None, clip_norm=clip_norm)  # later runs gather ahead, in this order
        ready.model.zero_grad()
        observer = Observer(ready.model, prefix, standing, len(times))
        ready.recorded.listener = observer.on_call
        with observer, observer.modules_followed(), observing(observer.on_op):
            ready.run(observer.after_phase, clip_norm=clip_norm)
            if update is not None:
                observer.phase, observer.microbatch = "optimizer", -1
                update(ready.model)
        ready.recorded.listener = None
        observer.add_update(ready.model, states, gathers_whole=plan.zero < 3)
        placed = _with_sync_after_backward(observer.placed) if is_stage else observer.placed
        return Trace(
            segments=_with_buckets(list(_segments(placed)), bucket_bytes),
            num_blocks=len(names),
            times=times,
            message_bytes=observer.message_bytes,
        )


def _segments(placed: Sequence[Placed]) -> Iterator[Segment]:
    def part(each: Placed) -> tuple[Phase, int, Standing | None, Place]:
        return each.phase, each.microbatch, each.block, each.place

    for (phase, microbatch, block, place), group in groupby(placed, part):
        yield Segment(
            phase=phase,
            microbatch=microbatch,
            blocks=() if block is None else block.blocks,
            place=place,
            events=tuple(each.event for each in group),
        )


def _with_sync_after_backward(placed: Sequence[Placed]) -> list[Placed]:
    """The events of a stage: a pipeline sums gradients over ranks when all microbatches are done.

    A sum is of the phase "gradients" then, and stays with the block whose gradients are summed.
    """
    sums = {
        each.event.number
        for each in placed
        if isinstance(each.event, Start) and each.event.purpose == "gradients" and each.phase == "backward"
    }
    moved = [each for each in placed if not isinstance(each.event, Compute) and each.event.number in sums]
    stay = [each for each in placed if isinstance(each.event, Compute) or each.event.number not in sums]
    end = next(i for i, each in enumerate([*stay, None]) if each is None or each.phase in ("gradients", "optimizer"))
    return [*stay[:end], *(replace(each, phase="gradients", microbatch=-1) for each in moved), *stay[end:]]


def _with_buckets(segments: Sequence[Segment], bucket_bytes: int) -> tuple[Segment, ...]:
    """The segments with their sums of gradients in buckets: as many sums of a group as fill a bucket are one.

    A bucket's sum starts where the bucket is full, or where its segment ends, and is awaited where its first sum was.
    """
    bucket_of: dict[int, int] = {}  # number of a sum -> of its bucket
    buckets: dict[int, tuple[int, Start]] = {}  # number of a bucket -> that of its last sum, and the whole
    for segment in segments:
        open_buckets: dict[tuple[str, str], Start] = {}
        for event in segment.events:
            if isinstance(event, Start) and event.purpose == "gradients":
                key = event.kind, event.group
                first = open_buckets.get(key)
                bucket = event if first is None else replace(first, nbytes=first.nbytes + event.nbytes)
                bucket_of[event.number], buckets[bucket.number] = bucket.number, (event.number, bucket)
                if bucket.nbytes < bucket_bytes:
                    open_buckets[key] = bucket
                else:
                    open_buckets.pop(key, None)
    started: set[int] = set()
    awaited: set[int] = set()

    def merged(event: Event) -> Iterator[Event]:
        if isinstance(event, Compute) or event.number not in bucket_of:
            yield event
            return
        number = bucket_of[event.number]
        last, bucket = buckets[number]
        if isinstance(event, Start):
            if event.number == last:
                started.add(number)
                yield bucket
        elif number in started and number not in awaited:
            awaited.add(number)
            yield Wait(number=number)

    return tuple(
        replace(segment, events=tuple(one for event in segment.events for one in merged(event))) for segment in segments
    )
