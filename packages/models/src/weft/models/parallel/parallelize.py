"""`parallelize`: a single-device model laid out on a mesh, its parameters DTensors, its boundaries reshards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.reshard import distribute
from weft.reshard.running.dtensor import as_process_mesh, one_mesh
from weft.reshard.running.groups import this_rank

from ..schedules.plan import PipelinePlan
from .axes import check_axes
from .boundaries import hook
from .context import check_context, hook_context
from .layouts import has_tensor_axis, parameter_layouts
from .pipeline.cut import cut
from .pipeline.run import Pipeline, stage_mesh_of
from .pipeline.stages import Stages
from .plan import ParallelPlan, pipeline_plan, without_pipeline
from .preparation import check_prepared, hook_prepared
from .recompute import blocks_of, recompute
from .resolve import Part, parts_of, parts_with, styles_of
from .rows import hook_rows
from .styles import PIPELINE_AXIS, TENSOR_AXIS
from .zero import check_zero, hook_zero, shard_layouts

_ATTRIBUTE = "_laid_out"  # of a parallel model: it is copied with it
PIPELINE_ATTRIBUTE = "_pipeline"


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """What a model was laid out by."""

    mesh: ProcessMesh
    plan: ParallelPlan


def parallelize(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh | None = None,
    plan: ParallelPlan | None = None,
    *,
    device_mesh: ProcessMesh | DeviceMesh | None = None,
) -> nn.Module:
    """`model` itself, laid out on `mesh` by `plan`: parameters become DTensors, and the layers' boundaries reshard.

    plan: the model's own where None. device_mesh: torch's name for the mesh; give one of the two.
    Parameters may be on the meta device. Tied parameters, found by identity, stay tied. On a mesh of one process the
    parameters are left as they are; so is a model that was laid out by an equal plan on an equal mesh. Give it tokens as a DTensor,
    sharded over the data axes; plain tokens count as replicated. Where all axes are of data, a model of this library computes on each
    rank's own rows, unwrapped once; where a module of it is hooked, replaced or compiled, by DTensors, as on any other mesh.
    Communication: none here, but for the mesh's process groups where they are new; in the forward, for every
    row- or vocab-parallel layer one reduction of its output, in the backward one for every input that
    column-parallel layers share, and those of prepared inputs and outputs; with `zero` the gathers of sharded parameters.
    Raises ValueError, before anything is changed and before any process group is used: as `parts_of` does; for an axis that
    plans do not know; where tied parameters are given two layouts, where a head would be cut, for an input that there is not;
    for a model of which a part is laid out already; for no mesh or two.
    """
    given = one_mesh(mesh, device_mesh)
    if given is None:
        raise ValueError("parallelize needs a mesh to lay the model out on")
    return _laid_out_on(model, as_process_mesh(given), own_plan(model) if plan is None else plan)


def _laid_out_on(
    model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, *, in_stage: bool = False, weights_wait: bool = False
) -> nn.Module:
    """See `parallelize`. in_stage: whether it holds stages alone. weights_wait: whether backward may leave the gradients of weights for later."""
    if _is_laid_out(model, mesh, plan):
        return model
    parts = parts_of(model, plan)  # a mistake in the plan is one on any mesh
    pipeline = pipeline_plan(plan)
    check_axes(mesh, pipeline=pipeline is not None)
    check_prepared(model, parts, mesh)
    for part in parts:
        check_zero(mesh, part.plan)
    recomputing = parts_with(parts, "recompute")
    for part in recomputing:
        blocks_of(model.get_submodule(part.name), part.plan)
    if pipeline is not None and PIPELINE_AXIS in mesh.axis_names:
        return _in_stages(model, mesh, plan, pipeline)
    if mesh.size == 1:
        return _recomputing(model, recomputing, mesh, plan)
    styles = styles_of(model, parts)
    attending = parts_with(parts, "context")
    for part in attending:
        check_context(model.get_submodule(part.name), mesh, part.plan)
    layouts = parameter_layouts(model, mesh, styles)
    at_rest = shard_layouts(parts, layouts, model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                layout = at_rest[f"{module_name}.{name}".lstrip(".")]
                made[parameter] = nn.Parameter(distribute(parameter.detach(), layout), parameter.requires_grad)
            module.register_parameter(name, made[parameter])
    if has_tensor_axis(mesh):
        for part in parts:
            prepared = {name for name, each in part.outputs.items() if TENSOR_AXIS in each.by_output.get(None, ())}
            hook(model, part.styles, part.plan, name=part.name, left=frozenset(prepared))
    for part in attending:
        hook_context(model.get_submodule(part.name), mesh, part.plan)
    hook_prepared(model, parts, mesh)
    if not weights_wait:  # such gradients are of products whose weights are the parameters themselves
        hook_rows(
            model, mesh, by_block=in_stage or at_rest != layouts or any(p.plan.recompute != "none" for p in recomputing)
        )
    hook_zero(model, parts, layouts, at_rest)
    setattr(model, _ATTRIBUTE, _LaidOut(mesh, plan))
    return _recomputing(model, recomputing, mesh, plan)


def _in_stages(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, pipeline: PipelinePlan) -> nn.Module:
    """The stages of this rank, each laid out on the mesh of its stage."""
    schedule = pipeline.make_schedule(mesh.axis_size(PIPELINE_AXIS))
    where = cut(model, pipeline, schedule)
    at = mesh.coordinate(this_rank())
    assert at is not None, "a model is laid out by the ranks of its mesh"
    parameters = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}
    stages = Stages(model, where, schedule.stages[at[PIPELINE_AXIS]])
    stage_mesh = stage_mesh_of(mesh, at[PIPELINE_AXIS])
    _laid_out_on(model, stage_mesh, without_pipeline(plan), in_stage=True, weights_wait=schedule.splits_backward)
    stages.take_calls(model)
    object.__setattr__(model, PIPELINE_ATTRIBUTE, Pipeline(pipeline, schedule, mesh, stages, parameters))
    setattr(model, _ATTRIBUTE, _LaidOut(mesh, plan))
    return model


def _recomputing(model: nn.Module, parts: list[Part], mesh: ProcessMesh, plan: ParallelPlan) -> nn.Module:
    """Last, since from then on a block's forward is another function."""
    for part in parts:
        if part.plan.recompute != "none":
            recompute(model.get_submodule(part.name), part.plan)
            setattr(model, _ATTRIBUTE, _LaidOut(mesh, plan))
    return model


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """What runs the stages of a model that was cut; None of one that was not."""
    return getattr(model, PIPELINE_ATTRIBUTE, None)


def laid_out_by(model: nn.Module) -> tuple[ProcessMesh, ParallelPlan] | None:
    """The mesh that a parallel model, or its stage on this rank, lies on, and its plan; None of one that is not parallel."""
    laid_out, pipeline = getattr(model, _ATTRIBUTE, None), pipeline_of(model)
    if not isinstance(laid_out, _LaidOut):
        return None
    return (laid_out.mesh if pipeline is None else pipeline.stage_mesh), laid_out.plan


def own_plan(model: nn.Module) -> ParallelPlan:
    """Raises ValueError for a model that has none."""
    own = getattr(model, "parallel_plan", None)
    if not callable(own):
        raise ValueError(f"a {type(model).__name__} has no parallel_plan() of its own; give parallelize a plan=")
    plan = own()
    if not isinstance(plan, ParallelPlan):
        raise ValueError(f"{type(model).__name__}.parallel_plan() gave {plan!r}, which is no ParallelPlan")
    return plan


def _is_laid_out(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan) -> bool:
    """Whether the model is laid out so already. Raises ValueError where it is otherwise, or a part of it is."""
    before = getattr(model, _ATTRIBUTE, None)
    if before == _LaidOut(mesh, plan):
        return True
    again = (
        "To lay it out anew, save_pretrained() it and read it by from_pretrained(folder, mesh, plan), or parallelize a new "
        "model and bring each parameter over by reshard()"
    )
    if isinstance(before, _LaidOut):
        what = "by another plan" if before.mesh == mesh else f"on {before.mesh}, and now on {mesh}"
        raise ValueError(f"this {type(model).__name__} was laid out before, {what}. {again}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} of this {type(model).__name__} is a DTensor already, on {parameter.device_mesh}: parallelize takes a "
                f"model of plain parameters. Models within a model are laid out at once, by ParallelPlan.merge(); "
                f"fully_shard() and what else makes DTensors comes after parallelize. {again}"
            )
    return False
