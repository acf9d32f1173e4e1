"""How a model's parameters lie under a plan."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.reshard import layout_of

from ..low_rank import LowRank
from .styles import TENSOR_AXIS, ColwiseParallel, RowwiseParallel, Style, VocabParallel

HEADS_AXIS, COPIES_AXIS = f"{TENSOR_AXIS}_heads", f"{TENSOR_AXIS}_copies"


def few_heads(model: nn.Module, styles: dict[str, Style], ways: int) -> dict[str, int]:
    """Column-parallel layers with fewer heads than `ways`, and how many they have: keys' and values', for which a sibling has
    heads that are divided evenly. Each of their heads then lies on several ranks.

    Raises ValueError where heads would be cut, listing the sizes that would not.
    """
    groups: dict[str, dict[str, int]] = {}
    units: dict[str, int] = {}
    for name, module in model.named_modules():
        layer: Any = module
        if isinstance(styles.get(name), ColwiseParallel) and getattr(layer, "unit", 1) > 1:
            groups.setdefault(name.rpartition(".")[0], {})[name] = layer.out_features // layer.unit
            units[name] = layer.unit
    few: dict[str, int] = {}
    for group in groups.values():
        most = max(group.values())
        for name, count in group.items():
            if not _fits(count, most, ways):
                wide = max(max(each.values()) for each in groups.values())
                works = [n for n in range(1, wide + 1) if all(_all_fit(each, n) for each in groups.values())]
                raise ValueError(
                    f"{name} has {count} heads of {units[name]}, which can be neither split evenly over {TENSOR_AXIS!r} of size "
                    f"{ways} nor each laid on as many ranks; sizes that work: {', '.join(map(str, works))}"
                )
            if count < ways:
                few[name] = count
    return few


def _all_fit(group: dict[str, int], ways: int) -> bool:
    most = max(group.values())
    return all(_fits(count, most, ways) for count in group.values())


def _fits(count: int, most: int, ways: int) -> bool:
    """Whether `count` heads go with the `most` that a sibling has, in so many ways."""
    return most % ways == 0 and (count % ways == 0 or ways % count == 0)


def has_tensor_axis(mesh: ProcessMesh) -> bool:
    """True where tensor parallelism has something to do."""
    return TENSOR_AXIS in mesh.axis_names and mesh.axis_size(TENSOR_AXIS) > 1


def parameter_layouts(model: nn.Module, mesh: ProcessMesh, styles: dict[str, Style]) -> dict[str, Layout]:
    """The layout of every parameter by name, tied names included, those of a module under another name left out.

    Where there are fewer key heads than ranks, those of the layers that make them lie on a mesh of their own, of the same
    ranks: its axes tp_heads and tp_copies make up tp, and each head is replicated over the copies.
    Raises ValueError where tied parameters disagree, or a head would be cut.
    """
    few = few_heads(model, styles, mesh.axis_size(TENSOR_AXIS)) if has_tensor_axis(mesh) else {}
    layouts: dict[str, Layout] = {}
    first: dict[nn.Parameter, str] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{leaf}".lstrip(".")
            if isinstance(module, LowRank):
                layouts[name] = adapter_layout(layouts[f"{module_name.rpartition('.')[0]}.weight"], leaf)
            elif module_name in few:
                layouts[name] = Layout(with_copies(mesh, few[module_name]), {HEADS_AXIS: Shard(0)})
            else:
                placements = _placements(styles.get(module_name), leaf) if has_tensor_axis(mesh) else {}
                layouts[name] = Layout(mesh, placements)
            other = first.setdefault(parameter, name)
            if layouts[other] != layouts[name]:
                raise ValueError(
                    f"{other!r} and {name!r} are one tied parameter, but the plan lays them out as "
                    f"({layouts[other]}) and ({layouts[name]}); give both modules styles that agree"
                )
    return layouts


def adapter_layout(weight: Layout, leaf: str) -> Layout:
    """How A or B of an adapter lies beside the weight of its layer: A as the weight's inputs, B as its outputs."""
    dim = {"A": 1, "B": 0}[leaf]
    return Layout(weight.mesh, [each if each == Shard(dim) else Replicate() for each in weight.placements])


def with_copies(mesh: ProcessMesh, heads: int) -> ProcessMesh:
    """The mesh with its tensor axis cut into that of the heads and that of their copies."""
    return mesh.unflatten(TENSOR_AXIS, **{HEADS_AXIS: heads, COPIES_AXIS: mesh.axis_size(TENSOR_AXIS) // heads})


def _placements(style: Style | None, leaf: str) -> dict[str, Shard]:
    match style:
        case ColwiseParallel() | VocabParallel():
            return {TENSOR_AXIS: Shard(0)}
        case RowwiseParallel() if leaf == "weight":
            return {TENSOR_AXIS: Shard(1)}
    return {}


def layouts_of(model: nn.Module) -> dict[str, Layout | None]:
    """How the parameters of a parallel model lie; None of those that are whole, on one process."""
    parameters = model.named_parameters()
    return {name: layout_of(each) if isinstance(each, DTensor) else None for name, each in parameters}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The global shapes of the parameters."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
