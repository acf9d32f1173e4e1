"""The peak memory of models of any depth, composed from short models: for a search over plans.

`memory_parts` follows a step of the model with few blocks, and again with one block more. Each kind of moment of a
step, as the backward of a middle block, holds bytes that grow by the same amount with each further block. `compose`
adds these up for a stage of any number of blocks and microbatches in flight. `predict_memory` follows the whole step
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from weft.mesh import ProcessMesh

from ..parallel.pipeline.run import stage_mesh_of
from ..parallel.plan import ParallelPlan, without_pipeline
from ..parallel.styles import PIPELINE_AXIS
from ..schedules.schedule import Schedule
from ..step.alike import block_names, signature, standing_blocks
from ..step.followed_step import KINDS, Device, FollowedStep, Peak
from ..step.live_storages import BEFORE
from ..step.memory import follow_model
from ..step.record import StepShape, meta_copy
from .trace import GATHERED_AHEAD

Place = Literal["before", "first", "middle", "last", "after", "none"]
MIDDLE = 1  # place of a middle block, in a composed `Peak` as in a short model


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes by kind: those of the model without blocks, and those that each block adds."""

    fixed: Mapping[str, float]
    per_block: Mapping[str, float]

    def at(self, blocks: int) -> dict[str, float]:
        return {kind: self.fixed[kind] + blocks * self.per_block[kind] for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment of most memory among those of a phase at a place of the model."""

    phase: str
    place: Place
    op: str
    held: Growth  # bytes by kind
    before: Mapping[str, float]  # of them: of what comes before the first block, as the embedding's parameters
    after: Mapping[str, float]  # of them: of what comes after the last block


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """A rank's memory in a step of a model of any depth; made by `memory_parts`, read by `compose`."""

    moments: tuple[Moment, ...]
    # Saved by one microbatch from its forward to its backward: by all blocks, before the first, and after the last.
    saved: float
    saved_per_block: float
    saved_before: float
    saved_after: float
    message: float  # bytes of the tensor [B, T, H] between blocks on this rank


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
    """The parts of the memory of `shape.rank` in training steps of `model` on `mesh` under `plan`, at any depth.

    Arguments: as for `trace_step` and `predict_memory`. On a mesh with "pp", the parts are of the mesh without that
    axis, for stages: parameters stay gathered and whole gradients add up until all microbatches are done.
    Cost: two steps on shapes of each of two models with few blocks. Communication: none.
    Raises ValueError for a model without blocks that are alike, and as `record`.
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
    steps = [
        follow_model(
            *(each, mesh, plan, shape),
            states=states, clip_norm=clip_norm, device=device, make_optimizer=make_optimizer,
        )
        for each in models
    ]  # fmt: skip
    blocks = steps[0].num_blocks
    first, second = (_peaks_by_class(each) for each in steps)
    moments = []
    for key, (peak, before, after) in first.items():
        values, longer = _kinds_of(peak), _kinds_of(second[key][0])
        per_block = {kind: (longer[kind] - values[kind]) / period for kind in KINDS}
        fixed = {kind: values[kind] - blocks * per_block[kind] for kind in KINDS}
        held = Growth(fixed, per_block)
        moments.append(Moment(phase=key[0], place=key[1], op=peak.op, held=held, before=before, after=after))
    saved = [each.saved_of_microbatch() for each in steps]
    saved_per_block = (saved[1].inside - saved[0].inside) / period
    return MemoryParts(
        moments=tuple(moments),
        saved=saved[0].inside - blocks * saved_per_block,
        saved_per_block=saved_per_block,
        saved_before=saved[0].before,
        saved_after=saved[0].after,
        message=saved[0].message,
    )


def _short_models(model: nn.Module, plan: ParallelPlan) -> tuple[list[nn.Module], int]:
    """Two models of the blocks that stand for all, the second with one repetition more; and the blocks of one."""
    names = block_names(model, plan)
    signatures = [signature(model.get_submodule(name), name) for name in names]
    standing = standing_blocks(signatures, GATHERED_AHEAD if plan.zero == 3 else 1)
    most = max((len(each.blocks) for each in standing), default=1)
    if most == 1:
        raise ValueError(
            f"{type(model).__name__} has {len(names)} blocks, of which none stands for others, so its memory is not "
            f"composed of blocks' memory; give a model with more blocks that are alike, or call predict_memory"
        )
    repeated = [each for each in standing if len(each.blocks) == most]
    numbers = [each.number for each in standing]
    longer = sorted([*numbers, *(each.blocks[1] for each in repeated)])
    return [_with_blocks(model, names, each) for each in (numbers, longer)], len(repeated)


def _with_blocks(model: nn.Module, names: Sequence[str], numbers: Sequence[int]) -> nn.Module:
    """A copy of the model on the meta device with some of its blocks."""
    copied = meta_copy(model)
    parent, _, own = names[0].rpartition(".")[0].rpartition(".")
    holder = copied.get_submodule(parent)
    members = getattr(holder, own)
    setattr(holder, own, nn.ModuleList([members[number] for number in numbers]))
    return copied


def compose(
    parts: MemoryParts, *, blocks: int, in_flight: float = 1, is_first: bool = True, is_last: bool = True
) -> Peak:
    """The peak of a rank with a stage of `blocks` blocks, and what it consists of.

    in_flight: microbatches whose activations are held at once; 1 without stages. A microbatch of which the rank holds
        the activations of one of two stages counts as a half.
    is_first, is_last: whether the stage has what comes before the first block (embedding) and after the last (head).
    """
    found: list[tuple[float, Moment, dict[str, float]]] = []
    saved = parts.saved + blocks * parts.saved_per_block
    saved += parts.saved_before if is_first else parts.message
    saved += parts.saved_after if is_last else 0
    for each in parts.moments:
        if (each.place == "before" and not is_first) or (each.place == "after" and not is_last):
            continue
        held = each.held.at(blocks)
        for belongs, bytes_of in ((is_first, each.before), (is_last, each.after)):
            if not belongs:
                held = {kind: held[kind] - bytes_of.get(kind, 0) for kind in KINDS}
        if each.phase in ("forward", "backward"):
            held["activations"] += (in_flight - 1) * saved
            held["messages"] += 0 if is_first else 2 * parts.message  # received, and on its way for the next microbatch
        found.append((sum(held.values()), each, held))
    _, moment, held = max(found, key=lambda entry: entry[0])
    place = {"before": BEFORE, "first": 0, "middle": MIDDLE, "last": blocks - 1}.get(moment.place, blocks)
    return Peak(phase=moment.phase, op=moment.op, place=place, **{kind: round(held[kind]) for kind in KINDS})


def stage_peaks(parts: MemoryParts, schedule: Schedule, ranges: Sequence[tuple[int, int]]) -> list[Peak]:
    """The peaks of the ranks along "pp". ranges: the blocks of each stage, [start, stop), as of `ranges_of`.

    Raises ValueError for a schedule that computes gradients of weights later: their operands stay until then, which the
    parts do not know; `predict_memory` does.
    """
    if schedule.splits_backward:
        raise ValueError(
            f"the schedule {schedule.name!r} computes gradients of weights later, and memory composed of parts does "
            f"not know for how long their operands stay; call predict_memory for each stage"
        )
    found = []
    for rank, stages in enumerate(schedule.stages):
        blocks = sum(ranges[stage][1] - ranges[stage][0] for stage in stages)
        in_flight = schedule.in_flight()[rank] / len(stages)
        is_last = schedule.num_stages - 1 in stages
        found.append(compose(parts, blocks=blocks, in_flight=in_flight, is_first=0 in stages, is_last=is_last))
    return found


def _kinds_of(peak: Peak) -> dict[str, int]:
    return {kind: getattr(peak, kind) for kind in KINDS}


def _peaks_by_class(step: FollowedStep) -> dict[tuple[str, Place], tuple[Peak, dict[str, float], dict[str, float]]]:
    """The peak of each phase at each place, and what of it belongs before the first block and after the last."""
    totals = step.live.bytes_at_moments()
    most: dict[tuple[str, Place], int] = {}
    for start, stop, phase, place in step.stretches():
        key = (phase, _place_of(place, step.num_blocks) if phase in ("forward", "backward") else "none")
        moment = max(range(start, stop), key=totals.__getitem__, default=None)
        if moment is not None and (key not in most or totals[moment] > totals[most[key]]):
            most[key] = moment
    return {key: (step.peak_at(at), *step.outside_at(at)) for key, at in most.items()}


def _place_of(place: int, num_blocks: int) -> Place:
    if place == BEFORE:
        return "before"
    if place >= num_blocks:
        return "after"
    return "first" if place == 0 else "last" if place == num_blocks - 1 else "middle"
