"""The experts' mesh: a second mesh over the ranks of a stage, with an axis "ep" that shards experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import nn
from weft.mesh import Layout, Placement, ProcessMesh, Shard

from ...checks import divisors
from ..plan import ExpertPlan
from ..resolve import ModulePlan
from ..styles import DATA_AXIS, EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, ExpertParallel


def folded_axes(mesh: ProcessMesh, plan: ExpertPlan) -> tuple[str, ...]:
    """The axes of a model's mesh that together become "dp" x "ep": the data axes and "cp"; with `over_tp` also "tp"."""
    excluded = (PIPELINE_AXIS,) if plan.over_tp else (PIPELINE_AXIS, TENSOR_AXIS)
    return tuple(axis for axis in mesh.axis_names if axis not in excluded)


@lru_cache(maxsize=1024)
def experts_mesh(mesh: ProcessMesh, plan: ExpertPlan) -> ProcessMesh:
    """The mesh of the experts over the ranks of `mesh`: axes "dp", "ep", then the axes not in `folded_axes`.

    The ranks along "dp" hold the same experts. The ranks along "ep" are neighbors in `mesh`.
    mesh: of a pipeline stage, without "pp".
    Raises ValueError where the size of "ep" does not divide the number of ranks over `folded_axes`.
    """
    folded = folded_axes(mesh, plan)
    ranks = math.prod(map(mesh.axis_size, folded))
    if ranks % plan.size:
        sizes = " x ".join(f"{axis}={mesh.axis_size(axis)}" for axis in folded) or "no axis of data"
        remedy = "" if plan.over_tp or TENSOR_AXIS not in mesh.axis_names else ", or fold tp in: over_tp=True"
        raise ValueError(
            f"ep={plan.size} does not divide the {ranks} rank{'s' if ranks > 1 else ''} of {sizes}, over which "
            f"experts are sharded; sizes that do: {', '.join(map(str, divisors(ranks)))}{remedy}"
        )
    remaining = [axis for axis in mesh.axis_names if axis not in folded]
    together = mesh.permute(*folded, *remaining).flatten(folded, into="folded")
    return together.unflatten("folded", **{DATA_AXIS: ranks // plan.size, EXPERT_AXIS: plan.size})


def find_expert_plans(module_plans: Sequence[ModulePlan]) -> dict[str, ExpertPlan]:
    """{module name: plan} of the modules of experts to shard over "ep".

    A module counts if its style is `ExpertParallel`, in a plan whose `experts` has size 2 or more.
    Raises ValueError for a plan with `experts` of size 2 or more and no module of this style.
    """
    found: dict[str, ExpertPlan] = {}
    for module_plan in module_plans:
        plan = module_plan.plan.experts
        if plan is None or plan.size == 1:
            continue
        names = [name for name, style in module_plan.styles.items() if isinstance(style, ExpertParallel)]
        if not names:
            raise ValueError(
                f"the plan has experts={plan!r}, but gives no module the style ExpertParallel(): a model without "
                f"mixtures of experts has none to shard; leave experts out"
            )
        found |= dict.fromkeys(names, plan)
    return found


def check_experts(model: nn.Module, mesh: ProcessMesh, module_plans: Sequence[ModulePlan]) -> None:
    """Raises ValueError where the size of "ep" does not divide the ranks of the mesh, or the experts of a module.

    Called by `parallelize` before the model is changed or a process group is used. mesh: the model's, with "pp".
    """
    if PIPELINE_AXIS in mesh.axis_names:
        mesh = mesh.select(**{PIPELINE_AXIS: 0}) if mesh.ndim > 1 else ProcessMesh([mesh.ranks[0]], [DATA_AXIS])
    for name, plan in find_expert_plans(module_plans).items():
        experts_mesh(mesh, plan)
        for leaf, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if parameter.shape[0] % plan.size:
                raise ValueError(
                    f"ep={plan.size} does not divide the {parameter.shape[0]} experts of {name}.{leaf}; sizes that "
                    f"do: {', '.join(map(str, divisors(parameter.shape[0])))}"
                )


def expert_meshes(mesh: ProcessMesh, module_plans: Sequence[ModulePlan]) -> dict[str, ProcessMesh]:
    """{module name: the experts' mesh} of the modules of experts to shard over "ep". mesh: of a pipeline stage."""
    return {name: experts_mesh(mesh, plan) for name, plan in find_expert_plans(module_plans).items()}


def expert_layout(mesh: ProcessMesh, in_expert: Mapping[str, Placement]) -> Layout:
    """The layout of a parameter [E, ...] of experts: dim 0 sharded over "ep", the further dims as `in_expert` says.

    mesh: the experts'. in_expert: {axis: placement} from the parameter's style; axes outside the mesh are left out.
    """
    placements = {axis: placement for axis, placement in in_expert.items() if axis in mesh.axis_names}
    return Layout(mesh, {EXPERT_AXIS: Shard(0), **placements})
