"""The layout of each parameter of a model: under a plan's styles, and as shards over data axes under ZeRO.

ZeRO (Rajbhandari et al. 2020) is a matter of layouts: parameters are stored sharded, and gathered to compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.reshard import layout_of
from weft.reshard.extension import ParameterSlot, exact_axes, gather_when_called, named_size, shard_replicated_axes

from ..exact import AXES, check_cut
from ..low_rank import Adapter, adapted_parameter
from .experts.placement import expert_layout
from .plan import ParallelPlan
from .resolve import ModulePlan
from .styles import (
    EXPERT_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    ColwiseParallel,
    ExpertParallel,
    RowwiseParallel,
    Style,
    VocabParallel,
)

HEADS_AXIS, COPIES_AXIS = f"{TENSOR_AXIS}_heads", f"{TENSOR_AXIS}_copies"  # the parts of "tp" in `_split_tensor_axis`


def layers_with_few_heads(model: nn.Module, styles: dict[str, Style], ranks: int) -> dict[str, int]:
    """{module name: number of heads} of column-parallel layers with fewer heads than the tensor axis has ranks.

    These layers are key and value projections beside a query projection whose heads divide evenly. Each key or value
    head is then replicated on several ranks.
    ranks: the size of the tensor axis.
    Raises ValueError where a head would be cut, listing possible sizes of the tensor axis.
    """
    groups: dict[str, dict[str, int]] = {}
    units: dict[str, int] = {}
    for name, module in model.named_modules():
        layer: Any = module
        if isinstance(styles.get(name), ColwiseParallel) and getattr(layer, "unit", 1) > 1:
            groups.setdefault(name.rpartition(".")[0], {})[name] = layer.out_features // layer.unit
            units[name] = layer.unit
    num_heads: dict[str, int] = {}
    for group in groups.values():
        most = max(group.values())
        for name, count in group.items():
            if not _fits(count, most, ranks):
                wide = max(max(each.values()) for each in groups.values())
                works = [n for n in range(1, wide + 1) if all(_all_fit(each, n) for each in groups.values())]
                raise ValueError(
                    f"{name} has {count} heads of {units[name]} features, which can be neither split evenly over "
                    f"{TENSOR_AXIS!r} of size {ranks} nor each replicated on equally many ranks; "
                    f"sizes that work: {', '.join(map(str, works))}"
                )
            if count < ranks:
                num_heads[name] = count
    return num_heads


def _all_fit(group: dict[str, int], ranks: int) -> bool:
    most = max(group.values())
    return all(_fits(count, most, ranks) for count in group.values())


def _fits(count: int, most: int, ranks: int) -> bool:
    """Whether `ranks` ranks split `most` heads evenly, and either split `count` heads evenly or hold equally many
    copies of each.
    """
    return most % ranks == 0 and (count % ranks == 0 or ranks % count == 0)


def has_tensor_axis(mesh: ProcessMesh) -> bool:
    """Whether the mesh has a tensor axis of two or more ranks; inside `exact_sums`, whether the named mesh has."""
    return TENSOR_AXIS in mesh.axis_names and named_size(mesh, TENSOR_AXIS) > 1


def parameter_layouts(
    model: nn.Module, mesh: ProcessMesh, styles: dict[str, Style], expert_meshes: Mapping[str, ProcessMesh]
) -> dict[str, Layout]:
    """The layout in which each parameter computes, by name.

    expert_meshes: the mesh of each module of experts that is sharded over "ep", by the module's name.
    Tied parameters are listed under each of their names. A module registered under several names is listed under
    the first.
    Each of `layers_with_few_heads` gets a mesh of its own over the same ranks, in which tp is unflattened into tp_heads
    and tp_copies: heads are sharded over tp_heads and replicated over tp_copies.
    Raises ValueError where the plan gives tied parameters different layouts, or a head would be cut.
    """
    num_heads: dict[str, int] = {}
    if has_tensor_axis(mesh):
        ranks = named_size(mesh, TENSOR_AXIS)
        num_heads = layers_with_few_heads(model, styles, ranks)
        if num_heads and exact_axes() is not None:
            name, count = next(iter(num_heads.items()))
            raise ValueError(
                f"{name} has {count} heads, which exact with {TENSOR_AXIS}={ranks} would hold on several ranks each; "
                f"name {TENSOR_AXIS}={count} or less"
            )
    layouts: dict[str, Layout] = {}
    first: dict[nn.Parameter, str] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{leaf}".lstrip(".")
            if isinstance(module, Adapter):
                layouts[name] = adapter_layout(layouts[adapted_parameter(module_name)], leaf, parameter.ndim)
            elif module_name in num_heads:
                layouts[name] = Layout(_split_tensor_axis(mesh, num_heads[module_name]), {HEADS_AXIS: Shard(0)})
            elif module_name in expert_meshes:
                layouts[name] = expert_layout(expert_meshes[module_name], _placements(styles[module_name], leaf))
            else:
                placements = _placements(styles.get(module_name), leaf) if has_tensor_axis(mesh) else {}
                layouts[name] = Layout(mesh, placements)
            tied = first.setdefault(parameter, name)
            if layouts[tied] != layouts[name]:
                raise ValueError(
                    f"{tied!r} and {name!r} are one tied parameter, but the plan lays them out as "
                    f"({layouts[tied]}) and ({layouts[name]}); give both modules styles that agree"
                )
    return layouts


def check_parameters(model: nn.Module, styles: dict[str, Style], exact: Mapping[str, int]) -> None:
    """Raise ValueError for a model whose heads or parameters some mesh within the named one cuts elsewhere.

    The answer is the same on every mesh. Call it inside `exact_sums(exact)`.
    """
    mesh = ProcessMesh.grid(**dict.fromkeys(AXES, 1))
    for name, layout in parameter_layouts(model, mesh, styles, {}).items():
        placement = layout[TENSOR_AXIS]
        if isinstance(placement, Shard):
            size = model.get_parameter(name).shape[placement.dim]
            check_cut(exact, TENSOR_AXIS, size, f"dim {placement.dim} of {name} of size {size}")


def adapter_layout(weight: Layout, leaf: str, ndim: int) -> Layout:
    """The layout of an adapter's parameter `leaf`, "A" or "B", given the layout of the weight.

    A [..., rank, in_features] is sharded where the weight's inputs are, B [..., out_features, rank] where the weight's
    outputs are. Of a stack, both are also sharded where the experts are. Over the remaining axes both are replicated.
    ndim: of the weight, 3 for a stack of experts [E, out_features, in_features].
    """
    dims = {*range(ndim - 2), ndim - 1 if leaf == "A" else ndim - 2}
    sharded = [Shard(dim) for dim in dims]
    return Layout(weight.mesh, [each if each in sharded else Replicate() for each in weight.placements])


def _split_tensor_axis(mesh: ProcessMesh, heads: int) -> ProcessMesh:
    """The mesh with its tensor axis unflattened into tp_heads, of size `heads`, and tp_copies."""
    return mesh.unflatten(TENSOR_AXIS, **{HEADS_AXIS: heads, COPIES_AXIS: mesh.axis_size(TENSOR_AXIS) // heads})


def _placements(style: Style | None, leaf: str) -> dict[str, Shard]:
    match style:
        case ColwiseParallel() | VocabParallel():
            return {TENSOR_AXIS: Shard(0)}
        case RowwiseParallel() if leaf == "weight":
            return {TENSOR_AXIS: Shard(1)}
        case ExpertParallel():
            return {TENSOR_AXIS: Shard(2 if leaf == "down_proj" else 1)}
    return {}


def layouts_of(model: nn.Module) -> dict[str, Layout | None]:
    """The layout of each parameter of a parallel model, by name; None for a plain parameter."""
    parameters = model.named_parameters()
    return {name: layout_of(each) if isinstance(each, DTensor) else None for name, each in parameters}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The global shape of each parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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
