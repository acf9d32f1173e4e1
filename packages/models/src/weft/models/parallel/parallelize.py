"""`parallelize` lays a single-device model out on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.reshard import distribute, exact_sums
from weft.reshard.extension import as_process_mesh, exact_axes, mark_exact, mesh_argument, separate_use, this_rank

from ..exact import check_exact, check_shared, check_ulysses, in_words
from ..schedules.pipeline_plan import PipelinePlan
from ..schedules.schedule import Schedule
from .boundaries import check_preparations, hook_preparations, hook_tensor_parallel
from .context import check_context, hook_context
from .experts.placement import check_experts, expert_meshes, hook_experts
from .local_modules import hook_rows
from .module_functions import hook_module_functions, hook_stage_loading
from .parameter_layouts import (
    check_parameters,
    check_zero,
    has_tensor_axis,
    hook_zero,
    parameter_layouts,
    shard_layouts,
)
from .pipeline.cut import Cut, cut
from .pipeline.run import Pipeline, shares_casts, stage_mesh_of
from .pipeline.stages import Stages
from .plan import ParallelPlan, exact_of, pipeline_plan, without_pipeline
from .recompute import blocks_of, recompute
from .resolve import ModulePlan, module_plans_of, plans_deciding, styles_of
from .styles import PIPELINE_AXIS, TENSOR_AXIS, Style, check_mesh_axes

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_ATTRIBUTE = "_laid_out"  # attribute of a parallel model: a `_MeshAndPlan`, copied with the model
PIPELINE_ATTRIBUTE = "_pipeline"  # of a model cut into stages: a `Pipeline`
# Finds a model's `Cut`, with the arguments of `cut`. Read by `parallelize` for a plan with stages. `on_shapes` sets a
# faster function around `parallelize`, for a step recorded on shapes.
FIND_CUT: ContextVar[Callable[[nn.Module, PipelinePlan, Schedule], Cut]] = ContextVar("how to cut", default=cut)


@dataclass(frozen=True, slots=True)
class _MeshAndPlan:
    """The mesh and the plan by which a model was laid out. Kept as an attribute of the model by `parallelize`."""

    mesh: ProcessMesh  # of a model cut into stages: with the axis "pp"
    plan: ParallelPlan


def parallelize(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh | None = None,
    plan: ParallelPlan | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
) -> nn.Module:
    """Lay `model` out on `mesh` by `plan`, in place: parameters become DTensors, and hooks at layer boundaries
    reshard.

    Returns `model`. Call the model with tokens as a DTensor sharded over the data axes; plain tokens count as
    replicated.
    plan: None for the model's own, `model.parallel_plan()`.
    mesh, device_mesh: two names of an argument, as torch has the second; give one, and None for the other.
    Parameters may be on the meta device. Tied parameters, found by identity, stay tied. On a mesh of one process,
    parameters remain plain tensors. A model laid out already, by an equal plan on an equal mesh, is returned
    unchanged.
    Where all axes are data axes, a model of this library computes on local tensors, unwrapped once a call, since
    each rank computes only rows of its own. Hooked, replaced and compiled modules compute on DTensors, as on any
    other mesh.
    Communication: none here, apart from making the mesh's process groups. In forward, a reduction of the output of
    each row- or vocab-parallel layer. In backward, a reduction for each input shared by column-parallel layers.
    Further, the reshards of prepared inputs and outputs, with `zero` the all-gathers of sharded parameters, and with
    `experts` the tokens on their way to experts and back, in both directions.
    Raises ValueError before the model is changed and before a process group is used: as `module_plans_of`
    does; for an axis unknown to plans; for a size of "ep" that does not divide the experts or the data axes; where
    tied parameters get two layouts, or a head would be cut; for a prepared input unknown to forward; for a model of
    which a part is laid out already; for no mesh, or two meshes.
    """
    chosen_mesh = mesh_argument(mesh, device_mesh)
    if chosen_mesh is None:
        raise ValueError("parallelize needs a mesh to lay the model out on")
    plan = own_plan(model) if plan is None else plan
    with exact_sums(exact_of(plan)):
        return _lay_out_on(model, as_process_mesh(chosen_mesh), plan)


def _lay_out_on(
    model: nn.Module,
    mesh: ProcessMesh,
    plan: ParallelPlan,
    *,
    in_stage: Callable[[str], bool] | None = None,
    weights_wait: bool = False,
) -> nn.Module:
    """See `parallelize`.

    in_stage: for a model cut into stages: whether a stage of this rank calls the module with a given name.
    weights_wait: whether backward may leave the gradients of weights for later, as zero-bubble schedules do.
    """
    if _has_this_layout(model, mesh, plan):
        return model
    module_plans = module_plans_of(model, plan)  # checked on every mesh, also where the mesh lacks the axes
    pipeline = pipeline_plan(plan)
    check_mesh_axes(mesh, pipeline=pipeline is not None)
    check_preparations(model, module_plans, mesh)
    check_experts(model, mesh, module_plans)
    for module_plan in module_plans:
        check_zero(mesh, module_plan.plan)
    recompute_plans = plans_deciding(module_plans, "recompute")
    for module_plan in recompute_plans:
        blocks_of(model.get_submodule(module_plan.name), module_plan.plan)
    exact, context_plans = exact_of(plan), plans_deciding(module_plans, "context")
    if in_stage is None:
        for module_plan in context_plans:
            check_context(model.get_submodule(module_plan.name), mesh, module_plan.plan)
            if exact is not None and module_plan.plan.context == "ulysses":
                check_ulysses(exact)
        if exact is not None:
            _check_exact_on(model, mesh, styles_of(model, module_plans), exact)
    if pipeline is not None and PIPELINE_AXIS in mesh.axis_names:
        return _lay_out_stages(model, mesh, plan, pipeline)
    if mesh.size == 1 and exact is None:
        return _add_recomputation(model, recompute_plans, mesh, plan)
    styles = styles_of(model, module_plans)
    layouts = parameter_layouts(model, mesh, styles, expert_meshes(mesh, module_plans))
    stored_layouts = shard_layouts(module_plans, layouts, model)
    parallel_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in parallel_parameters:
                layout = stored_layouts[f"{module_name}.{name}".lstrip(".")]
                local = distribute(parameter.detach(), layout)
                parallel_parameters[parameter] = nn.Parameter(local, parameter.requires_grad)
                if exact is not None:
                    mark_exact(parallel_parameters[parameter], exact)
            module.register_parameter(name, parallel_parameters[parameter])
    if exact is not None:
        _separate_uses(model, in_stage)
    if has_tensor_axis(mesh):
        for module_plan in module_plans:
            with_prepared_output = {
                name
                for name, style in module_plan.outputs.items()
                if TENSOR_AXIS in style.placements_by_output.get(None, ())
            }
            hook_tensor_parallel(model, module_plan, with_prepared_output)
    hook_experts(model, mesh, module_plans)
    for module_plan in context_plans:
        hook_context(model.get_submodule(module_plan.name), mesh, module_plan.plan, module_plan.name)
    hook_preparations(model, module_plans, mesh)
    # Weights may wait only where a product's operand is the parameter, not its local tensor. And a rank which stands
    # for several shards of the mesh of `exact` takes the sums over its rows shard by shard, op by op.
    on_named_mesh = exact is None or mesh.shape == tuple(
        exact.get(axis, mesh.axis_size(axis)) for axis in mesh.axis_names
    )
    if not weights_wait and on_named_mesh:
        recomputes = any(module_plan.plan.recompute != "none" for module_plan in recompute_plans)
        hook_rows(model, mesh, by_block=in_stage is not None or stored_layouts != layouts or recomputes)
    hook_zero(model, module_plans, layouts, stored_layouts)
    hook_module_functions(model)
    if exact is not None and in_stage is None:
        model.register_forward_pre_hook(partial(_refuse_outside, exact))
    setattr(model, _ATTRIBUTE, _MeshAndPlan(mesh, plan))
    return _add_recomputation(model, recompute_plans, mesh, plan)


def _check_exact_on(model: nn.Module, mesh: ProcessMesh, styles: dict[str, Style], exact: Mapping[str, int]) -> None:
    """Raise ValueError for a mesh that cannot keep `exact`, and for a model that cannot keep `exact` on any mesh."""
    check_exact(dict(zip(mesh.axis_names, mesh.shape, strict=True)), exact)
    for axis, size in exact.items():
        if size > 1 and axis not in mesh.axis_names:
            raise ValueError(f"exact {in_words(exact)} names {axis}, which {mesh} lacks; give the mesh {axis}=1")
    check_parameters(model, styles, exact)


def _separate_uses(model: nn.Module, in_stage: Callable[[str], bool] | None) -> None:
    """Let each use of a tied parameter be summed over the ranks by itself; the sums are then added.

    Two stages of a pipeline, each with a use, sum this way. Under `exact`, one stage must give the same bits.
    in_stage: as for `_lay_out_on`. Uses outside this rank's stages are left alone.
    """
    found: set[nn.Parameter] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (in_stage is not None and not in_stage(module_name)):
                continue
            if parameter in found:
                separate_use(module, name)
            found.add(parameter)


def _holds(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(each is parameter for each in module._parameters.values())


def _lay_out_stages(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, pipeline: PipelinePlan) -> nn.Module:
    """Cut the model, and lay this rank's stages out on the mesh of their ranks."""
    schedule = pipeline.make_schedule(mesh.axis_size(PIPELINE_AXIS))
    model_cut = FIND_CUT.get()(model, pipeline, schedule)
    coordinate = mesh.coordinate(this_rank())
    assert coordinate is not None, "a model is laid out by the ranks of its mesh"
    exact, trained, state_names = exact_of(plan), dict(model.named_parameters()), set(model.state_dict())
    if exact is not None:
        for name in model_cut.shared(schedule.rank_of):
            if trained[name].requires_grad:
                holders = [module for module, each in model.named_modules() if _holds(each, trained[name])]
                check_shared(exact, name, [model_cut.stages_of(module) for module in holders])
    parameters = {name: parameter.detach().to("meta") for name, parameter in trained.items()}
    own = schedule.stages[coordinate[PIPELINE_AXIS]]
    stages = Stages(model, model_cut, own)
    stage_mesh = stage_mesh_of(mesh, coordinate[PIPELINE_AXIS])
    _lay_out_on(
        *(model, stage_mesh, without_pipeline(plan)),
        in_stage=lambda module: not model_cut.stages_of(module).isdisjoint(own),
        weights_wait=schedule.splits_backward,
    )
    hook_stage_loading(model, state_names)
    stages.route_calls(model)
    object.__setattr__(
        model,
        PIPELINE_ATTRIBUTE,
        Pipeline(model, pipeline, schedule, mesh, stages, parameters, shares_casts=shares_casts(plan)),
    )
    setattr(model, _ATTRIBUTE, _MeshAndPlan(mesh, plan))
    return model


def _add_recomputation(
    model: nn.Module, module_plans: list[ModulePlan], mesh: ProcessMesh, plan: ParallelPlan
) -> nn.Module:
    """Make the blocks recompute in backward, by the plan of each part. Done last, because this replaces the blocks'
    forward.
    """
    for module_plan in module_plans:
        if module_plan.plan.recompute != "none":
            recompute(model.get_submodule(module_plan.name), module_plan.plan)
            setattr(model, _ATTRIBUTE, _MeshAndPlan(mesh, plan))
    return model


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline of a model cut into stages; None for any other model.

    Called by training steps, checkpoints, LoRA and generation, to treat a model with stages apart.
    """
    return getattr(model, PIPELINE_ATTRIBUTE, None)


def mesh_and_plan_of(model: nn.Module) -> tuple[ProcessMesh, ParallelPlan] | None:
    """The mesh and the plan of a parallel model; None for a model not laid out.

    Called by `divide_batch` to lay out a batch, and by the first `forward_backward` to check the model.
    For a model cut into stages, the mesh is the mesh of this rank's stages, without "pp".
    """
    marker, pipeline = getattr(model, _ATTRIBUTE, None), pipeline_of(model)
    if not isinstance(marker, _MeshAndPlan):
        return None
    return (marker.mesh if pipeline is None else pipeline.stage_mesh), marker.plan


def exact_of_model(model: nn.Module) -> Mapping[str, int] | None:
    """The `exact` of a parallel model's plan: {axis: size} of the named mesh.

    Called by `forward_backward`, and in each call of `find_gradients` and `find_loss`, by `with_exact_sums`.
    None for a plan without `exact`, and for a model not laid out.
    """
    marker = getattr(model, _ATTRIBUTE, None)
    return exact_of(marker.plan) if isinstance(marker, _MeshAndPlan) else None


def with_exact_sums(
    function: Callable[Concatenate[nn.Module, Arguments], Result],
) -> Callable[Concatenate[nn.Module, Arguments], Result]:
    """Decorator for a function whose first argument is a parallel model: sums inside follow the plan's `exact`.

    Decorates `find_gradients` and `find_loss`.
    Also marks parameters with the plan's `exact`, for clipping and optimizers: `to_empty()`, `to()` and `lora` make
    further parameters after `parallelize`.
    """

    @wraps(function)
    def call(model: nn.Module, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        exact = exact_of_model(model)
        if exact is not None:
            for parameter in model.parameters():
                mark_exact(parameter, exact)
        with exact_sums(exact):
            return function(model, *args, **kwargs)

    return call


def _refuse_outside(exact: Mapping[str, int], model: nn.Module, args: object) -> None:
    """Forward pre-hook of a model with `exact`. Raises RuntimeError for a forward with gradients outside exact sums."""
    if torch.is_grad_enabled() and exact_axes() is None:
        raise RuntimeError(
            f"the plan of this {type(model).__name__} has exact {in_words(exact)}, which this forward and its backward "
            f"would not keep; train by forward_backward or inside exact_sums, or call the model under torch.no_grad()"
        )


def own_plan(model: nn.Module) -> ParallelPlan:
    """The plan of `model.parallel_plan()`: taken by `parallelize`, and by predictions, where the caller gives no plan.

    Raises ValueError for a model without this method, and where the method returns something else.
    """
    own = getattr(model, "parallel_plan", None)
    if not callable(own):
        raise ValueError(f"a {type(model).__name__} has no parallel_plan() of its own; give parallelize a plan=")
    plan = own()
    if not isinstance(plan, ParallelPlan):
        raise ValueError(f"{type(model).__name__}.parallel_plan() gave {plan!r}, which is no ParallelPlan")
    return plan


def _has_this_layout(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan) -> bool:
    """Whether the model is laid out by this plan on this mesh already.

    Raises ValueError where the model, or a part of it, is laid out in another way.
    """
    before = getattr(model, _ATTRIBUTE, None)
    if before == _MeshAndPlan(mesh, plan):
        return True
    remedy = (
        "To lay the model out anew, save it by save_pretrained(model, folder) and read it by "
        "from_pretrained(folder, mesh, plan), or parallelize a new model and bring each parameter to the new model's "
        "layout by reshard()"
    )
    if isinstance(before, _MeshAndPlan):
        what = "by another plan" if before.mesh == mesh else f"on {before.mesh}, and now on {mesh}"
        raise ValueError(f"this {type(model).__name__} was laid out before, {what}. {remedy}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} of this {type(model).__name__} is a DTensor already, on {parameter.device_mesh}: parallelize "
                f"takes a model of plain parameters. Models within a model are laid out at once, by "
                f"ParallelPlan.merge(); fully_shard(), and anything else that makes DTensors, comes after parallelize. "
                f"{remedy}"
            )
    return False
