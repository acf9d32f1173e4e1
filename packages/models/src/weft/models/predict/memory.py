"""Composes the peak memory of models of any depth from two short models, for a search over plans.

`memory_parts` follows a step of the model with few blocks, and again with a repetition of blocks more. At each kind of
moment, as in the backward of a middle block, the bytes grow by the same amount with each further block. `compose` adds
these up for a stage of any number of blocks and microbatches in flight. `predict_memory` follows the whole step
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from weft.mesh import ProcessMesh

from ..parallel.pipeline.run import shares_casts, stage_mesh_of
from ..parallel.plan import ParallelPlan, without_pipeline
from ..parallel.styles import PIPELINE_AXIS
from ..schedules.schedule import Schedule
from ..step.alike import block_names, copy_blocks, representatives_of
from ..step.followed_step import KINDS, Device, FollowedStep, Peak
from ..step.live_storages import BEFORE
from ..step.memory import follow_model
from ..step.record import StepShape
from .trace import GATHERED_AHEAD

PeakPlace = Literal["before", "first", "middle", "last", "after", "none"]  # of a moment: which block, or none
UNDIVIDED = ("gathered", "activations", "recomputed", "logits")  # kinds that further ranks along "dp" do not divide
MIDDLE = 1  # `Peak.place` of a middle block in a composed peak


@dataclass(frozen=True, slots=True)
class _Growth:
    """Bytes by kind, as a function of the number of blocks."""

    fixed: Mapping[str, float]  # without blocks
    per_block: Mapping[str, float]  # added by each block

    def at(self, blocks: int) -> dict[str, float]:
        """The bytes by kind of a model of `blocks` blocks."""
        return {kind: self.fixed[kind] + blocks * self.per_block[kind] for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The moment of the most memory in a phase at a place of the model."""

    phase: str
    place: PeakPlace
    op: str  # as of `Peak`
    held: _Growth
    before: Mapping[str, float]  # bytes of `held` only on the first stage, as the embedding's parameters; by kind
    after: Mapping[str, float]  # bytes of `held` only on the last stage, as the logits; by kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParts:
    """The bytes that a microbatch saves for backward, in a model of any depth. Made by `saved_parts`."""

    fixed: float  # n blocks save `fixed + n * per_block`
    per_block: float
    shared_per_block: float  # bytes that a block keeps for all microbatches of a stage: casts of parameters
    before: float  # before the first block
    after: float  # after the last block
    message: float  # bytes of the tensor [B, T, H] between blocks on this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """A rank's memory in a step of a model of any depth. Made by `memory_parts`, read by `compose`."""

    moments: tuple[_Moment, ...]
    saved: SavedParts


def memory_parts(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan,
    shape: StepShape,
    *,
    states: int | Mapping[str, int] = 2,
    clip_norm: float | None = None,
    device: Device = "cuda",
    make_optimizer: Callable[[nn.Module], Any] | None = None,
) -> MemoryParts:
    """The memory of rank `shape.rank` in a training step of models like `model`, of any depth.

    Arguments: as for `trace_step` and `predict_memory`. On a mesh with "pp", the parts are of a stage, on the mesh
    without "pp": parameters stay gathered, and full gradients add up, until all microbatches are done.
    Cost: two steps on shapes for each of two models with few blocks. Communication: none.
    Raises ValueError for a model with too few alike blocks, and as `record`.
    """
    steps, period = _follow_short_models(
        *(model, mesh, plan, shape),
        states=states, clip_norm=clip_norm, device=device, make_optimizer=make_optimizer,
    )  # fmt: skip
    blocks = steps[0].num_blocks
    first, second = (_peaks_by_class(each) for each in steps)
    moments = []
    for key, (peak, before, after) in first.items():
        values, longer = _kinds_of(peak), _kinds_of(second[key][0])
        per_block = {kind: (longer[kind] - values[kind]) / period for kind in KINDS}
        fixed = {kind: values[kind] - blocks * per_block[kind] for kind in KINDS}
        held = _Growth(fixed, per_block)
        moments.append(_Moment(phase=key[0], place=key[1], op=peak.op, held=held, before=before, after=after))
    return MemoryParts(moments=tuple(moments), saved=_saved_parts(steps, period))


def saved_parts(
    model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, shape: StepShape, *, device: Device = "cuda"
) -> SavedParts:
    """`MemoryParts.saved` alone, from the forwards of a step: a third of the time. Arguments: as for `memory_parts`."""
    steps, period = _follow_short_models(model, mesh, plan, shape, device=device, only_forward=True)
    return _saved_parts(steps, period)


def _follow_short_models(
    model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, shape: StepShape, **options: Any
) -> tuple[list[FollowedStep], int]:
    """Follow a step of two short models, the second with a repetition of blocks more; and the blocks of a repetition.

    On a mesh with "pp", the step is a stage's. options: of `follow_model`.
    """
    count = max(1, shape.microbatches)
    has_stages = PIPELINE_AXIS in mesh.axis_names
    if has_stages:
        if count == 1 and plan.pipeline is not None:
            count = plan.pipeline.microbatches
        mesh, plan = stage_mesh_of(mesh, 0), without_pipeline(plan)
        shape = replace(shape, rank=mesh.rank_at(**dict.fromkeys(mesh.axis_names, 0)))
        plan = replace(plan, zero=min(plan.zero, 2))
    ran = 2 if has_stages else min(count, 2)  # the second finds the gradients of the first
    rows, *sizes = shape.batch
    assert not isinstance(rows, Tensor), "tensors are not divided into microbatches"
    shape = replace(shape, batch=(rows // count * ran, *sizes), microbatches=ran)
    models, period = _short_models(model, plan)
    shares = has_stages and shares_casts(plan)
    return [follow_model(each, mesh, plan, shape, has_shared_casts=shares, **options) for each in models], period


def _saved_parts(steps: Sequence[FollowedStep], period: int) -> SavedParts:
    shorter, longer = (each.saved_of_microbatch() for each in steps)
    per_block = (longer.inside - shorter.inside) / period
    return SavedParts(
        fixed=shorter.inside - steps[0].num_blocks * per_block,
        per_block=per_block,
        shared_per_block=(longer.shared - shorter.shared) / period,
        before=shorter.before,
        after=shorter.after,
        message=shorter.message,
    )


def _short_models(model: nn.Module, plan: ParallelPlan) -> tuple[list[nn.Module], int]:
    """Two models with few of the blocks, the second with a repetition more; and the blocks of a repetition."""
    names = block_names(model, plan)
    representatives = representatives_of(model, names, GATHERED_AHEAD if plan.zero == 3 else 1)
    most = max((len(each.blocks) for each in representatives), default=1)
    if most == 1:
        raise ValueError(
            f"{type(model).__name__} has {len(names)} blocks, of which none stands for others, so its memory is not "
            f"composed of blocks' memory; give a model with more blocks that are alike, or call predict_memory"
        )
    repeated = [each for each in representatives if len(each.blocks) == most]
    numbers = [each.number for each in representatives]
    longer = sorted([*numbers, *(each.blocks[1] for each in repeated)])
    return [copy_blocks(model, names, each) for each in (numbers, longer)], len(repeated)


def compose(
    parts: MemoryParts, *, blocks: int, in_flight: float = 1, is_first: bool = True, is_last: bool = True
) -> Peak:
    """The peak of a rank with `blocks` blocks.

    in_flight: microbatches whose activations are held at once, as a mean over the rank's stages; 1 without stages.
    is_first, is_last: whether the rank has the model's part before the first block (embedding), after the last (head).
    """
    found: list[tuple[float, _Moment, dict[str, float]]] = []
    of_microbatch = parts.saved
    saved = of_microbatch.fixed + blocks * of_microbatch.per_block
    saved += of_microbatch.before if is_first else of_microbatch.message
    saved += of_microbatch.after if is_last else 0
    for each in parts.moments:
        if (each.place == "before" and not is_first) or (each.place == "after" and not is_last):
            continue
        held = each.held.at(blocks)
        for belongs, bytes_of in ((is_first, each.before), (is_last, each.after)):
            if not belongs:
                held = {kind: held[kind] - bytes_of.get(kind, 0) for kind in KINDS}
        if each.phase in ("forward", "backward"):
            held["activations"] += (in_flight - 1) * saved
            # A message received, and a message on its way for the next microbatch.
            held["messages"] += 0 if is_first else 2 * of_microbatch.message
        found.append((sum(held.values()), each, held))
    _, moment, held = max(found, key=lambda entry: entry[0])
    place = {"before": BEFORE, "first": 0, "middle": MIDDLE, "last": blocks - 1}.get(moment.place, blocks)
    return Peak(phase=moment.phase, op=moment.op, place=place, **{kind: round(held[kind]) for kind in KINDS})


def undivided_bytes(parts: MemoryParts, *, blocks: int) -> float:
    """The most bytes at a moment, of a rank with `blocks` blocks, that no further ranks along "dp" divide.

    Counted are gathered parameters and activations.
    """
    return max(sum(each.held.at(blocks)[kind] for kind in UNDIVIDED) for each in parts.moments)


def stage_peaks(parts: MemoryParts, schedule: Schedule, ranges: Sequence[tuple[int, int]]) -> list[Peak]:
    """The peaks of the ranks along "pp". ranges: the blocks of each stage, [start, stop), from `ranges_of`.

    Raises ValueError for a schedule with gradients of weights computed later: parts do not tell how long the operands
    stay. Call `predict_memory` there.
    """
    if schedule.splits_backward:
        raise ValueError(
            f"the schedule {schedule.name!r} computes gradients of weights later, and memory composed of parts does "
            f"not know for how long their operands stay; call predict_memory for each stage"
        )
    found = []
    for stages, held in zip(schedule.stages, schedule.in_flight(), strict=True):
        blocks = sum(ranges[stage][1] - ranges[stage][0] for stage in stages)
        in_flight = held / len(stages)
        is_last = schedule.num_stages - 1 in stages
        found.append(compose(parts, blocks=blocks, in_flight=in_flight, is_first=0 in stages, is_last=is_last))
    return found


def _kinds_of(peak: Peak) -> dict[str, int]:
    return {kind: getattr(peak, kind) for kind in KINDS}


def _peaks_by_class(step: FollowedStep) -> dict[tuple[str, PeakPlace], tuple[Peak, dict[str, float], dict[str, float]]]:
    """By phase and place, the peak, and the bytes by kind before the first block and after the last."""
    totals = step.live.bytes_at_moments()
    most: dict[tuple[str, PeakPlace], int] = {}
    for start, stop, phase, place in step.stretches():
        key = (phase, _place_of(place, step.num_blocks) if phase in ("forward", "backward") else "none")
        moment = max(range(start, stop), key=totals.__getitem__, default=None)
        if moment is not None and (key not in most or totals[moment] > totals[most[key]]):
            most[key] = moment
    return {key: (step.peak_at(at), *step.outside_at(at)) for key, at in most.items()}


def _place_of(place: int, num_blocks: int) -> PeakPlace:
    if place == BEFORE:
        return "before"
    if place >= num_blocks:
        return "after"
    return "first" if place == 0 else "last" if place == num_blocks - 1 else "middle"
