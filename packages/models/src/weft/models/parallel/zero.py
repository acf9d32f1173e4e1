"""ZeRO (Rajbhandari et al. 2020) as layouts: parameters are stored sharded over data axes, and gathered to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard.extension import ParameterSlot, gather_when_called, named_size, shard_replicated_axes

from .plan import ParallelPlan
from .resolve import ModulePlan
from .styles import EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS


def check_zero(mesh: ProcessMesh, plan: ParallelPlan) -> None:
    """Raises ValueError for a mesh without the axes over which `plan.zero` shards.

    Refused are zero on a mesh without a data axis, and an axis of zero_over that is missing from the mesh or shards the
    model itself ("tp", "pp").
    """
    if not plan.zero:
        return
    has = f"{mesh} has {', '.join(mesh.axis_names)}"
    if plan.zero_over is None:
        if not _data_axes(mesh):
            raise ValueError(
                f"zero={plan.zero} shards over the axes of data, dp and cp, and {has}; lay the model out on a mesh "
                f"with an axis of data, or leave zero at 0"
            )
        return
    for axis in plan.zero_over:
        if axis not in _data_axes(mesh):
            owns = {TENSOR_AXIS: "shards layers", PIPELINE_AXIS: "has the stages"}
            why = owns.get(axis, "is not there") if axis in mesh.axis_names else "is not there"
            raise ValueError(f"zero={plan.zero} over {axis!r}, which {why}: {has}; name axes of data in zero_over")


def shard_layouts(
    module_plans: Sequence[ModulePlan], layouts: Mapping[str, Layout], model: nn.Module
) -> dict[str, Layout]:
    """The layout in which each parameter is stored, by name.

    layouts: the layout in which each parameter computes, by name. Under `zero`, the stored layout shards this layout
        further, over the data axes of size above 1, or over `zero_over` if given. Experts on a mesh of their own are
        sharded over all ranks with the same experts.
    """
    stored_layouts = {}
    for name, layout in layouts.items():
        plan = plan_of(module_plans, name)
        shape = tuple(model.get_parameter(name).shape)
        # the experts' mesh has data axes of its own, which zero_over does not name
        axes = (
            _data_axes(layout.mesh)
            if EXPERT_AXIS in layout.mesh.axis_names
            else plan.zero_over or _data_axes(layout.mesh)
        )
        stored_layouts[name] = (
            shard_replicated_axes(layout, shape, [a for a in axes if named_size(layout.mesh, a) > 1])
            if plan.zero
            else layout
        )
    return stored_layouts


def plan_of(module_plans: Sequence[ModulePlan], name: str) -> ParallelPlan:
    """The plan of the innermost module around the parameter `name` that has a plan; a default plan without any."""
    outer = [each for each in module_plans if not each.name or name.startswith(f"{each.name}.")]
    return max(outer, key=lambda each: len(each.name)).plan if outer else ParallelPlan()


def hook_zero(
    model: nn.Module,
    module_plans: Sequence[ModulePlan],
    layouts: Mapping[str, Layout],
    stored_layouts: Mapping[str, Layout],
) -> None:
    """Make the modules of a laid-out model gather sharded parameters when called.

    A call of a block gathers all parameters within the block. A call of a module outside the blocks gathers the
    parameters of the module itself, not of its submodules.
    layouts: the layout in which each parameter computes, by name.
    stored_layouts: the layout in which each parameter is stored, by name.
    Communication: none here. Forward issues an all-gather per block and dtype, unless the parameters are gathered
    already. With zero=3, backward issues the all-gathers again (not with regather=False).
    """
    names = {module: name for name, module in model.named_modules()}
    units: dict[nn.Module, dict[tuple[nn.Module, str], ParameterSlot]] = {}
    plans: dict[nn.Module, ParallelPlan] = {}
    for module, unit in _modules_with_units(model):
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{names[module]}.{leaf}".lstrip(".")
            if layouts[name] == stored_layouts[name]:
                continue
            plan = plans.setdefault(unit, plan_of(module_plans, name))
            units.setdefault(unit, {})[module, leaf] = ParameterSlot(
                module=module,
                name=leaf,
                layout=layouts[name],
                keep_between_calls=plan.zero < 3,
                accumulate_grad=plan.zero < 2,
            )
    if units:
        gather_when_called(
            model,
            {module: list(places.values()) for module, places in units.items()},
            keep_for_backward=lambda module: not plans[module].regather,
        )


def _modules_with_units(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(module, unit) for every module, once per place in the tree; a call of `unit` gathers the module's parameters.

    The unit is the enclosing block, a child of the outermost nn.ModuleList. Outside of blocks, the unit is the module.
    """
    found: list[tuple[nn.Module, nn.Module]] = []

    def visit(module: nn.Module, block: nn.Module | None) -> None:
        found.append((module, block or module))
        for child in module.children():
            is_block = block is None and isinstance(module, nn.ModuleList)
            visit(child, child if is_block else block)

    visit(model, None)
    return found


def _data_axes(mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes of the mesh that shard data: all but "tp", the parts of "tp", "ep" and "pp"."""
    return tuple(
        axis
        for axis in mesh.axis_names
        if axis not in (TENSOR_AXIS, EXPERT_AXIS, PIPELINE_AXIS) and not axis.startswith(f"{TENSOR_AXIS}_")
    )
