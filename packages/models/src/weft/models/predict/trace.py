"""`trace_step`: a rank's training step as a `Trace`, from a run on shapes.

`Observer` sees Weft's ops, further ops of torch, collectives and waits. Few of the alike blocks, and few microbatches,
run and stand for all: the cost grows neither with the mesh nor with the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from torch import Tensor, nn
from weft.kernels.extension import observing
from weft.mesh import ProcessMesh

from ..parallel import ParallelPlan
from ..parallel.pipeline.run import stage_mesh_of
from ..parallel.plan import without_pipeline
from ..parallel.styles import PIPELINE_AXIS
from ..step.alike import Representative, block_names, copy_blocks, representatives_of
from ..step.communication import Phase
from ..step.record import PreparedStep, StepShape, StopStep, on_shapes
from .events import Place, Segment, Trace
from .observer import Observer, Placed
from .whole_model import in_buckets, of_whole_model, sum_after_backward

GATHERED_AHEAD = 2  # blocks whose parameters are gathered, or are being gathered, while a block computes, under ZeRO
RUN_MICROBATCHES = 3  # the first makes gradients, the second stands for all between, the last's gradients are sent


def trace_step(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan,
    shape: StepShape,
    *,
    clip_norm: float | None = None,
    update: Callable[[nn.Module], None] | None = None,
    states: Mapping[str, int] | int = 2,
    reduced: Reduced | None = None,
    by_gradient: bool = False,
    only_passes: bool = False,
) -> Trace:
    """The trace of rank `shape.rank` in a step of `model` on `mesh` under `plan`.

    model, mesh, plan, shape, clip_norm, update: as for `run_on_shapes`. states: the optimizer's tensors for each
    element of a parameter, as for `predict_memory`. reduced: of `reduce_model`, to reduce the model once for many
    traces. by_gradient: a sum for each gradient, for `merge_sums`; False: in buckets of `shape.bucket_bytes`.
    only_passes: trace the forward and backward passes of the first two microbatches alone, to save time.
    The step is the rank's second. The first, of one microbatch, makes tables, of rotary angles for instance, and finds
    the order of gathers and the layouts of summed gradients. Where no gradients are summed, a forward makes the tables.
    On a mesh with "pp" the trace is of a single stage with all blocks, on the mesh without "pp"; `Segment.blocks` tells
    the stages apart. Parameters are then gathered once for all microbatches, also under zero=3.
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
    times = times_of(count)
    if count > 1:
        rows, *sizes = shape.batch
        assert not isinstance(rows, Tensor), "tensors are not divided into microbatches"
        shape = replace(shape, batch=(rows // count * len(times), *sizes), microbatches=len(times))
    model, names, representatives = reduce_model(model, plan, is_stage=is_stage) if reduced is None else reduced
    prefix = names[0].rpartition(".")[0] if names else ""
    bucket_bytes, shape = shape.bucket_bytes, replace(shape, bucket_bytes=1)
    with on_shapes(model, mesh, plan, shape) as ready:
        assert ready is not None, "a mesh without stages has every rank's step"
        sums_nothing = only_passes and plan.zero == 0  # the last microbatch's backward, which is left out, sums
        first = replace(ready, microbatches=ready.microbatches[:1])
        first.run(_stop_after_forward if sums_nothing else lambda phase: None, clip_norm=clip_norm)
        ready.model.zero_grad()
        observer = Observer(ready.model, prefix, representatives, len(times))
        ready.recorded.listener = observer.on_call
        with observer, observer.modules_followed(), observing(observer.on_op):
            if only_passes:
                _run_passes(ready, observer)
            else:
                ready.run(observer.after_phase, clip_norm=clip_norm)
                if update is not None:
                    observer.phase, observer.microbatch = "optimizer", -1
                    update(ready.model)
        ready.recorded.listener = None
        placed = observer.placed
        if not only_passes:
            held = observer.add_update(ready.model, states)
            placed = of_whole_model(placed, held, by_part=is_stage)
            if is_stage and plan.zero < 2:  # with more, every backward sums its gradients
                placed = sum_after_backward(placed)
        trace = Trace(
            segments=tuple(_segments(placed)),
            num_blocks=len(names),
            times=times,
            message_bytes=observer.message_bytes,
        )
        return trace if by_gradient else merge_sums(trace, bucket_bytes)


def _stop_after_forward(phase: Phase) -> None:
    raise StopStep


def _run_passes(ready: PreparedStep, observer: Observer) -> None:
    """Run the passes of the first two microbatches."""

    def after_phase(phase: Phase) -> None:
        if phase == "backward" and observer.microbatch == min(1, len(ready.microbatches) - 1):
            raise StopStep
        observer.after_phase(phase)

    ready.run(after_phase)


def times_of(count: int) -> tuple[int, ...]:
    """`Trace.times` of a step of `count` microbatches: for how many each microbatch of the trace stands."""
    return (1,) * count if count <= RUN_MICROBATCHES else (1, count - 2, 1)


def merge_sums(trace: Trace, bucket_bytes: int) -> Trace:
    """The trace with sums of gradients in buckets. trace: of `trace_step`, with a sum for each gradient."""
    return replace(trace, segments=in_buckets(trace.segments, bucket_bytes))


class Reduced(NamedTuple):
    """A model on the meta device with only the representatives of alike blocks. Made by `reduce_model`."""

    model: nn.Module
    names: list[str]  # of all blocks
    representatives: list[Representative]


def reduce_model(model: nn.Module, plan: ParallelPlan, *, is_stage: bool) -> Reduced:
    """Copy the model on the meta device, with few of the alike blocks.

    is_stage: whether for a mesh with "pp". Nothing is gathered in a stage's passes, and the last block works as all but
    the first: the first block's backward gathers the gradient of the embedding's output.
    """
    names = block_names(model, plan)
    ahead = GATHERED_AHEAD if plan.zero and not is_stage else 1
    representatives = representatives_of(model, names, ahead, 0 if is_stage else ahead)
    return Reduced(copy_blocks(model, names, [each.number for each in representatives]), names, representatives)


def _segments(placed: Sequence[Placed]) -> Iterator[Segment]:
    def part(each: Placed) -> tuple[Phase, int, Representative | None, Place]:
        return each.phase, each.microbatch, each.block, each.place

    for (phase, microbatch, block, place), group in groupby(placed, part):
        yield Segment(
            phase=phase,
            microbatch=microbatch,
            blocks=() if block is None else block.blocks,
            place=place,
            events=tuple(each.event for each in group),
        )
