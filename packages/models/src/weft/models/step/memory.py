"""`predict_memory`: predicts the bytes of a rank under a plan, without data or processes.

Parameters, gradients and optimizer state follow from layouts; activations and the peak from a step on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from weft.kernels.extension import meta_as_cpu
from weft.mesh import Layout, ProcessMesh
from weft.mesh.extension import as_mesh
from weft.reshard.extension import contiguous_shard_slices

from ..parallel.experts.placement import expert_meshes
from ..parallel.parallelize import own_plan
from ..parallel.parameter_layouts import check_zero, parameter_layouts, plan_of, shard_layouts
from ..parallel.pipeline.cut import Cut, cut
from ..parallel.pipeline.run import stage_mesh_of
from ..parallel.plan import ParallelPlan, pipeline_plan
from ..parallel.resolve import module_plans_of, styles_of
from ..parallel.styles import PIPELINE_AXIS
from .criterion import Criterion
from .followed_step import Device, FollowedStep, Memory, follow_step, total_of
from .record import StepShape, on_shapes


def predict_memory(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    rank: int = 0,
    states: int | Mapping[str, int] = 2,
    batch: Sequence[int] | tuple[Tensor, Tensor] | None = None,
    criterion: Criterion | None = None,
    inputs: Mapping[str, Any] | None = None,
    microbatches: int = 1,
    clip_norm: float | None = None,
    reduce_dtype: torch.dtype | None = None,
    device: Device = "cuda",
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Memory:
    """Predict the bytes that `rank` holds of `model` laid out on `mesh` by `plan`, without data or processes.

    model: not parallel yet, on any device. plan: None for the model's own. With pipeline stages, the rank's stages
        count.
    states: tensors of optimizer state for each trained element: 2 for Adam, 1 for momentum; or a mapping from each
        parameter's name to this number.
    batch, criterion, inputs, microbatches, clip_norm, reduce_dtype: as for `record`. Given a batch, two steps are run
        on shapes, and all memory of the second is followed: see `Peak`. batch None predicts the memory between steps
        alone.
    device: of the step. On a GPU ("cuda") a Weft op allocates nothing but results; on a CPU also tensors in between.
    make_optimizer: makes an optimizer to run on meta tensors, for the optimizer's states and the memory of the update.
        None for an update in place without further memory, as by torch's fused Adam, with `states` tensors of state.
    Result `gathered`: up to zero=2, full copies of all sharded parameters. A shard in a contiguous range of the full
        copy shares memory with the copy, and only the rest counts. With zero=3 nothing is kept between calls, but with
        stages full copies are kept until all microbatches are done, as with zero=2.
    Result `activations`: tensors saved by ops. Attention saves inputs, output and a logsumexp for each row.
    Not counted: memory outside torch's tensors, as a CUDA context, buffers of NCCL and gaps of an allocator; memory
    allocated and freed inside an op of torch; on a GPU the scratch memory of kernels. A message to another stage counts
    until the end of the sending action. A rank outside a mesh with stages holds nothing.
    Call this function under autocast where the model is called under autocast, as with `record`.
    Communication: none. Raises ValueError as `parallelize`; with a batch also as `record`.
    """
    shape = StepShape(
        batch=(1,) if batch is None else batch,
        criterion=criterion,
        rank=rank,
        inputs=inputs or {},
        microbatches=microbatches,
        reduce_dtype=reduce_dtype,
    )
    if batch is not None and (PIPELINE_AXIS not in as_mesh(mesh).axis_names or rank in as_mesh(mesh)):
        step = follow_model(
            *(model, mesh, plan, shape),
            states=states, clip_norm=clip_norm, device=device, make_optimizer=make_optimizer,
        )  # fmt: skip
        return replace(step.between_steps(), activations=step.most_saved(), peak=step.peak())
    return total_of(bytes_of_parameters(model, as_mesh(mesh), plan, rank=rank, states=states))


def bytes_of_parameters(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan | None,
    *,
    rank: int,
    states: int | Mapping[str, int],
    known_cut: Cut | None = None,
) -> dict[str, Memory]:
    """A rank's bytes between steps for each parameter, by name, from layouts.

    known_cut: of the model into the plan's stages, if known; None to cut the model. Further arguments: as for
    `predict_memory`. Called by `predict_memory`, `follow_model` and `weft explain`.
    """
    plan = own_plan(model) if plan is None else plan
    module_plans = module_plans_of(model, plan)
    for module_plan in module_plans:
        check_zero(mesh, module_plan.plan)
    cut_plan = pipeline_plan(plan) if PIPELINE_AXIS in mesh.axis_names else None
    own_names = {name for name, _ in model.named_parameters()}
    stage_mesh = mesh
    if cut_plan is not None:
        coordinate = mesh.coordinate(rank)
        if coordinate is None:
            return {}
        schedule = cut_plan.make_schedule(mesh.axis_size(PIPELINE_AXIS))
        stages = set(schedule.stages[coordinate[PIPELINE_AXIS]])
        model_cut = known_cut or cut(model, cut_plan, schedule)
        own_names = {name for name, users in model_cut.parameters.items() if users & stages}
        stage_mesh = stage_mesh_of(mesh, coordinate[PIPELINE_AXIS])
    meshes = expert_meshes(stage_mesh, module_plans)
    layouts = parameter_layouts(model, stage_mesh, styles_of(model, module_plans), meshes)
    stored_layouts = shard_layouts(module_plans, layouts, model)
    found = {}
    for name, parameter in model.named_parameters():
        if name not in own_names:
            continue

        def local_bytes(layout: Layout, parameter: nn.Parameter = parameter) -> int:
            return math.prod(layout.local_shape(parameter.shape, rank)) * parameter.dtype.itemsize

        full_bytes, shard_bytes = local_bytes(layouts[name]), local_bytes(stored_layouts[name])
        zero, gathered = plan_of(module_plans, name).zero, 0
        if layouts[name] != stored_layouts[name] and (zero < 3 or cut_plan is not None):
            full_shape = tuple(parameter.shape)
            shares_memory = contiguous_shard_slices(stored_layouts[name], layouts[name], full_shape, rank) is not None
            gathered = full_bytes - shard_bytes if shares_memory else full_bytes
        trained = parameter.requires_grad
        found[name] = Memory(
            parameters=shard_bytes,
            gathered=gathered,
            gradients=(shard_bytes if zero > 1 else full_bytes) if trained else 0,
            states=(states if isinstance(states, int) else states[name]) * shard_bytes if trained else 0,
        )
    return found


def follow_model(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None,
    shape: StepShape,
    *,
    states: int | Mapping[str, int] = 2,
    clip_norm: float | None = None,
    device: Device = "cuda",
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    has_shared_casts: bool = False,
    only_forward: bool = False,
) -> FollowedStep:
    """Follow the storages of a step on shapes. Called by `predict_memory`, `memory_parts` and `saved_parts`.

    shape: with a rank in the mesh. has_shared_casts, only_forward: as for `follow_step`. Further arguments and errors:
    as for `predict_memory`.
    """
    by_parameter = bytes_of_parameters(model, as_mesh(mesh), plan, rank=shape.rank, states=states)
    with meta_as_cpu() if device == "cpu" else nullcontext(), on_shapes(model, mesh, plan, shape) as ready:
        assert ready is not None, "the rank is in the mesh"
        return follow_step(
            *(ready, by_parameter),
            clip_norm=clip_norm, device=device, make_optimizer=make_optimizer, has_shared_casts=has_shared_casts,
            only_forward=only_forward,
        )  # fmt: skip
