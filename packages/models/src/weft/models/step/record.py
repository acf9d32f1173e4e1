"""`record`: runs a training step of any model on shapes, and returns the communication of one rank of any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.mesh.extension import as_mesh
from weft.reshard import GradientSync, distribute
from weft.reshard.extension import BUCKET_BYTES, Collective, Recorded, recording

from ..parallel import ParallelPlan, parallelize
from ..parallel.parallelize import FIND_CUT, own_plan, pipeline_of
from ..parallel.parameter_layouts import layouts_of, shapes_of
from ..parallel.pipeline.cut import Cut, cut
from ..parallel.pipeline.step import Microbatch, RepeatedActions, RepeatsDiffer, can_repeat
from ..parallel.plan import exact_of
from ..parallel.styles import DATA_AXIS, PIPELINE_AXIS
from ..schedules.pipeline_plan import PipelinePlan
from ..schedules.schedule import Schedule
from .alike import MessageForms, follow_few, message_forms, meta_copy
from .communication import Communication, Phase
from .criterion import Criterion, ProbedCriterion, weight_criterion
from .exact_refusals import exact_criterion
from .find_gradients import find_gradients
from .forward_backward import divide_batch
from .loss_parts import RouterLosses


def record(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    batch: Sequence[int] | tuple[Tensor, Tensor],
    criterion: Criterion | None = None,
    rank: int = 0,
    inputs: Mapping[str, Any] | None = None,
    microbatches: int = 1,
    clip_norm: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    reduce_dtype: torch.dtype | None = None,
) -> Communication:
    """Predict the communication of `rank` in a training step of `model` on `mesh` under `plan`, without processes.

    A copy of the model is laid out by `parallelize`, and runs forward, backward and gradient buckets on tensors
    without data. Each collective is recorded where a real step would start the collective. The result therefore holds
    for every module, plan and criterion able to run, and equals a real step's communication.
    model: not parallel yet, on any device; unchanged. plan: None for the model's own.
    batch: the global shape [B, T] of int64 tokens and targets; or two tensors, of which only shapes and dtypes are
        used. Laid out by `lay_out_batch`, or by rows over "dp" if not [B, T].
    criterion: of the model's output and targets, a scalar; None: the mean cross-entropy over all tokens.
    inputs: further arguments of the model, by name, like `dropout_key`. None: no further arguments.
    clip_norm: includes the gradient norm's communication, as in a step with clipping; 0 computes the norm and scales
        nothing. None: no norm.
    microbatches: the number of equal parts of the rows, as in `forward_backward`; 1: the number of the plan's pipeline,
        if any. With several, the criterion is weighted as by `forward_backward`.
    bucket_bytes, reduce_dtype: GradientSync's `bucket_bytes` and `dtype`; reduce_dtype None: each gradient's own.
    With stages, only the rank's stages run, in the schedule's order. A message's bytes count at the receiver; a send
        counts as 0 bytes.
    Cost: the host time of a rank's step; with stages, plus a forward and backward of the whole model on a microbatch,
        to find the messages between stages. The cost does not grow with the mesh.
    A rank outside the mesh communicates nothing.
    Communication: none; no process group is needed or touched.
    Raises ValueError for an already parallel model, a negative rank, a batch that is neither shape nor tensors,
        microbatches that do not divide the batch, and as `parallelize`; under a plan with `exact`, also for a weighted
        criterion refused by `forward_backward`. Errors of a model that reads a tensor's values are passed on.
    """
    shape = StepShape(
        batch=batch,
        criterion=criterion,
        rank=rank,
        inputs=inputs or {},
        microbatches=microbatches,
        bucket_bytes=bucket_bytes,
        reduce_dtype=reduce_dtype,
    )
    return run_on_shapes(model, mesh, plan, shape, clip_norm=clip_norm).communication


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The arguments of `record` except model, mesh, plan and clip_norm, with the same meanings. For `on_shapes`.

    Made by `record` and `predict_memory`, for `weft train` and `weft explain` by `Outline.step_shape`, and for the
    prediction of step times by `Workload.shape`.
    """

    batch: Sequence[int] | tuple[Tensor, Tensor]
    criterion: Criterion | None = None
    rank: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    bucket_bytes: int = BUCKET_BYTES
    reduce_dtype: torch.dtype | None = None


@dataclass(slots=True)
class SharedRuns:
    """Results shared by the runs on shapes of several ranks of a pipeline, to find each result once.

    Made empty by `check_run`, which records many ranks, and by `ExplainedStep`, which reads `cut` after the run.
    Filled and read by `on_shapes`.
    """

    cut: Cut | None = None  # of the model into stages; None before the first run, and without stages
    # By a rank's coordinates in the mesh of a stage: the forms of the messages between all stages at the coordinates.
    forms: dict[tuple[int, ...], MessageForms] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The result of `run_on_shapes`. For a rank outside a mesh with stages, all fields are empty."""

    communication: Communication = field(default_factory=Communication)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # global, of the rank's parameters by name
    layouts: Mapping[str, Layout | None] = field(default_factory=dict)  # of the same parameters; None: a plain tensor
    schedule: Schedule | None = None  # the pipeline's; None without stages


def run_on_shapes(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None,
    shape: StepShape,
    *,
    clip_norm: float | None = None,
    update: Callable[[nn.Module], None] | None = None,
    listen: Callable[[Recorded], None] | None = None,
    repeats: bool = True,
    shared: SharedRuns | None = None,
) -> RecordedStep:
    """`record`, with the layouts of parameters and the pipeline's schedule in the result.

    shape: the further arguments of `record`.
    update: called with the rank's model after gradient sync and clipping; issues the collectives of the optimizer's
        step, as `communicate_update` does for Muon. None for an optimizer without communication.
    listen, shared: as for `on_shapes`. listen is called again for a second run.
    repeats: whether a pipeline may run a few alike microbatches, and copy the collectives for the rest
        (`RepeatedActions`). Done only where model and criterion are Weft's own, and where each backward but the last
        sums no gradients over ranks, as under ZeRO 0 and 1. Where the collectives of a microbatch turn out to differ,
        the whole step runs a second time, without copies.
    Called by `record`, and by `Outline.record_step` for `weft train` and `weft explain`. Errors: as for `record`.
    """
    issued: dict[Phase, list[Collective]] = {}
    with on_shapes(model, mesh, plan, shape, listen, shared) as ready:
        if ready is None:
            return RecordedStep()
        recorded, pipeline = ready.recorded, pipeline_of(ready.model)
        repeats = repeats and recorded.can_repeat and not ready.sync.sends_every_pass
        if pipeline is not None and repeats and can_repeat(model, shape.criterion):
            pipeline.repeated = RepeatedActions(recorded)

        def after_phase(phase: Phase) -> None:
            issued.setdefault(phase, []).extend(recorded.take_each())

        recorded.take_each()
        try:
            ready.run(after_phase, clip_norm=clip_norm)
        except RepeatsDiffer:
            differs = True
        else:
            differs = False
            if update is not None:
                update(ready.model)
                after_phase("optimizer")
        step = RecordedStep(
            Communication.of(issued),
            shapes_of(ready.model),
            layouts_of(ready.model),
            None if pipeline is None else pipeline.schedule,
        )
    if differs:
        return run_on_shapes(
            *(model, mesh, plan, shape),
            clip_norm=clip_norm, update=update, listen=listen, repeats=False, shared=shared,
        )  # fmt: skip
    return step


class StopStep(Exception):
    """Leaves out the rest of a step. Raised by `trace_step` and `follow_step` in `after_phase`, caught by
    `PreparedStep.run`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A rank's prepared step on meta tensors; `run` may be called several times. Yielded by `on_shapes`."""

    model: nn.Module  # the rank's part of the parallel model
    criterion: Criterion  # weighted for the microbatches, as `find_gradients` takes a criterion
    microbatches: Sequence[Microbatch]  # of this rank, laid out
    sync: GradientSync  # of `model`
    recorded: Recorded  # the recording of the rank's collectives

    def run(self, after_phase: Callable[[Phase], None], *, clip_norm: float | None = None) -> None:
        """Run forward, backward and gradient sync. clip_norm: as for `find_gradients`.

        after_phase: as for `find_gradients`; may raise StopStep.
        Called by `run_on_shapes`, `trace_step` and `follow_step`.
        """
        with suppress(StopStep):
            find_gradients(
                self.model, self.criterion, self.microbatches, self.sync, clip_norm=clip_norm, after_phase=after_phase
            )


@contextmanager
def on_shapes(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None,
    shape: StepShape,
    listen: Callable[[Recorded], None] | None = None,
    shared: SharedRuns | None = None,
) -> Iterator[PreparedStep | None]:
    """A context with a rank's step prepared on shapes: yields the `PreparedStep` to run inside.

    listen: called once with the recording, before the model is laid out, to set listeners: `CallRecorder.listen`, which
        lists calls for the check against hangs. None: no listeners.
    shared: for runs of several ranks of a pipeline with equal arguments; None for a single run.
    Yields None for a rank outside a mesh with the axis "pp".
    Further arguments and errors: as for `record`. Called by `run_on_shapes`, `follow_model`, `trace_step` and
    `record_sites`.
    """
    mesh, rank = as_mesh(mesh), shape.rank
    if rank < 0:
        raise ValueError(f"rank is {rank}; give one of the ranks of {mesh}, from 0 on")
    tokens, targets = _on_meta(shape.batch)
    compute: Criterion = _mean_cross_entropy(targets) if shape.criterion is None else shape.criterion
    with recording(mesh, rank) as recorded, torch.device("meta"):
        if listen is not None:
            listen(recorded)
        plan = own_plan(model) if plan is None else plan
        if PIPELINE_AXIS in mesh.axis_names and rank not in mesh:
            yield None
            return

        def find_cut(copied: nn.Module, pipeline: PipelinePlan, schedule: Schedule) -> Cut:
            if shared is not None and shared.cut is not None:
                return shared.cut
            return cut(copied, pipeline, schedule, follow_few if can_repeat(model, None) else None)

        token = FIND_CUT.set(find_cut)
        try:
            parallel = parallelize(meta_copy(model), mesh, plan)
        finally:
            FIND_CUT.reset(token)
        pipeline = pipeline_of(parallel)
        count = shape.microbatches
        if pipeline is not None and count == 1:
            count = pipeline.plan.microbatches
        if tokens.ndim == 2 and tokens.shape == targets.shape:
            microbatches = divide_batch(parallel, tokens, targets, count, shape.inputs)
        elif count == 1:
            laid_out_tokens, laid_out_targets = _lay_out_rows(mesh, tokens, targets)
            inputs = dict(shape.inputs)
            microbatches = [Microbatch(args=(laid_out_tokens,), kwargs=inputs, targets=laid_out_targets)]
        else:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} with targets of shape {tuple(targets.shape)} cannot be "
                f"divided into {count} microbatches; give both as [B, T]"
            )
        weighted, exact = weight_criterion(compute, microbatches, targets), exact_of(plan)
        # Without stages and with a single microbatch, a criterion without `denominator` is called unweighted, as in a
        # training loop of the caller's own.
        of_logits = weighted.criterion if isinstance(weighted, RouterLosses) else weighted
        if len(microbatches) > 1 or pipeline is not None or not isinstance(of_logits, ProbedCriterion):
            compute = weighted if exact is None else exact_criterion(compute, weighted, exact)
        if pipeline is not None:
            with _unheard(recorded):  # real stages learn the forms from messages
                shared = SharedRuns() if shared is None else shared
                shared.cut = pipeline.stages.cut
                coordinate = pipeline.stage_mesh.coordinate(rank)
                assert coordinate is not None, "the rank is one of its stage's"
                place = tuple(coordinate.values())
                if place not in shared.forms:
                    shared.forms[place] = message_forms(
                        *(model, pipeline, plan, microbatches[0], compute),
                        few_blocks=can_repeat(model, shape.criterion),
                    )
                pipeline.forms = shared.forms[place]
        sync = GradientSync(parallel, bucket_bytes=shape.bucket_bytes, dtype=shape.reduce_dtype)
        try:
            yield PreparedStep(
                model=parallel, criterion=compute, microbatches=microbatches, sync=sync, recorded=recorded
            )
        finally:
            sync.close()


@contextmanager
def _unheard(recorded: Recorded) -> Iterator[None]:
    """A context in which the recording's listeners are not called. Entered by `on_shapes` around `message_forms`."""
    listeners = recorded.listener, recorded.group_listener
    recorded.listener = recorded.group_listener = None
    try:
        yield
    finally:
        recorded.listener, recorded.group_listener = listeners


def _mean_cross_entropy(targets: Tensor) -> Criterion:
    """The criterion where `StepShape.criterion` is None. targets: of the whole batch."""
    return partial(cross_entropy, denominator=float(math.prod(targets.shape)))


def _lay_out_rows(mesh: ProcessMesh, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out tokens and targets of shapes other than [B, T]: rows over "dp", nothing further."""
    if mesh.size == 1:
        return tokens, targets
    rows = Layout(mesh, {DATA_AXIS: Shard(0)} if DATA_AXIS in mesh.axis_names else {})
    return distribute(tokens, rows), distribute(targets, rows)


def _on_meta(batch: Sequence[int] | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and targets on the meta device. batch: as for `record`. Raises ValueError for another value."""
    first, second = batch if len(batch) == 2 else (None, None)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.to("meta"), second.to("meta")
    if not batch or not all(isinstance(size, int) and size > 0 for size in batch):
        raise ValueError(
            f"batch is {batch!r}; give the global shape of tokens and targets, as (8, 64), or the two tensors"
        )
    shape = tuple(int(size) for size in batch if not isinstance(size, Tensor))
    tokens, targets = (torch.empty(shape, dtype=torch.long, device="meta") for _ in range(2))
    return tokens, targets
