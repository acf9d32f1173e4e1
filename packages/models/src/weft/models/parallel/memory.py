"""Bytes of parameters, gradients and optimizer state that a rank holds under a plan, from layouts alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, ProcessMesh
from weft.mesh.process_mesh import as_mesh
from weft.reshard.running.wholes import stretch_in

from .layouts import parameter_layouts
from .pipeline.cut import cut
from .pipeline.run import stage_mesh_of
from .plan import ParallelPlan, pipeline_plan, without_pipeline
from .resolve import parts_of, styles_of
from .styles import PIPELINE_AXIS
from .zero import check_zero, plan_of, shard_layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on a rank. parameters, gradients, states: between steps; gathered: of whole parameters above their shards, at most.

    gradients: as they add up over several passes before a step.
    """

    parameters: int
    gathered: int
    gradients: int
    states: int

    @property
    def nbytes(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.states


def predict_memory(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    rank: int = 0,
    states: int = 2,
) -> Memory:
    """What `rank` holds of `model` laid out on `mesh` by `plan`, without data or processes; of stages, its own.

    model: not parallel yet, on any device. plan: the model's own where None.
    states: tensors that the optimizer keeps for an element that it changes: 2 of Adam, 1 of momentum.
    What is gathered is, up to zero=2, all that lies on shards: where a shard is a stretch of its whole's memory, what the others
    have of it. With zero=3 it is nothing between calls.
    Communication: none. Raises ValueError as `parallelize`.
    """
    mesh = as_mesh(mesh)
    plan = model.parallel_plan() if plan is None else plan  # type: ignore[operator]
    pipeline, own = pipeline_plan(plan), {name for name, _ in model.named_parameters()}
    if pipeline is not None and PIPELINE_AXIS in mesh.axis_names:
        at = mesh.coordinate(rank)
        schedule = pipeline.make_schedule(mesh.axis_size(PIPELINE_AXIS))
        held = set() if at is None else {*schedule.stages[at[PIPELINE_AXIS]]}
        own = {name for name, stages in cut(model, pipeline, schedule).parameters.items() if stages & held}
        mesh, plan = stage_mesh_of(mesh, 0 if at is None else at[PIPELINE_AXIS]), without_pipeline(plan)
    parts = parts_of(model, plan)
    for part in parts:
        check_zero(mesh, part.plan)
    layouts = parameter_layouts(model, mesh, styles_of(model, parts))
    at_rest = shard_layouts(parts, layouts, model)
    counts = {"parameters": 0, "gathered": 0, "gradients": 0, "states": 0}
    for name, parameter in model.named_parameters():
        if name not in own:
            continue

        def held(layout: Layout, parameter: nn.Parameter = parameter) -> int:
            return math.prod(layout.local_shape(parameter.shape, rank)) * parameter.dtype.itemsize

        whole, shard, zero = held(layouts[name]), held(at_rest[name]), plan_of(parts, name).zero
        counts["parameters"] += shard
        if layouts[name] != at_rest[name] and zero < 3:
            within = stretch_in(at_rest[name], layouts[name], tuple(parameter.shape), rank) is not None
            counts["gathered"] += whole - shard if within else whole
        if parameter.requires_grad:
            counts["gradients"] += shard if zero > 1 else whole
            counts["states"] += states * shard
    return Memory(**counts)
