"""The layout of each parameter of a model under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.reshard import layout_of
from weft.reshard.extension import exact_axes, named_size

from ..exact import AXES, check_cut
from ..low_rank import Adapter, adapted_parameter
from .experts.placement import expert_layout
from .styles import TENSOR_AXIS, ColwiseParallel, ExpertParallel, RowwiseParallel, Style, VocabParallel

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
