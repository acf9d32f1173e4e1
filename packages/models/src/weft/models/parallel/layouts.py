"""How a model's parameters lie under a plan."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from weft.mesh import Layout, ProcessMesh, Shard

from .styles import TENSOR_AXIS, ColwiseParallel, RowwiseParallel, Style, VocabParallel


def check_units(model: nn.Module, styles: dict[str, Style], ways: int) -> None:
    """Raises ValueError where the outputs of a column-parallel layer would be parted within a unit: a head would be cut."""
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(styles.get(name), ColwiseParallel) and getattr(module, "unit", 1) > 1
    }
    counts = {name: layer.out_features // layer.unit for name, layer in layers.items()}
    for name, count in counts.items():
        if count % ways:
            most = math.gcd(*counts.values())
            works = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise ValueError(
                f"{name} has {count} heads of {layers[name].unit}, which cannot be split evenly over {TENSOR_AXIS!r} of "
                f"size {ways}; sizes that work: {works}"
            )


def has_tensor_axis(mesh: ProcessMesh) -> bool:
    """True where tensor parallelism has something to do."""
    return TENSOR_AXIS in mesh.axis_names and mesh.axis_size(TENSOR_AXIS) > 1


def parameter_layouts(model: nn.Module, mesh: ProcessMesh, styles: dict[str, Style]) -> dict[str, Layout]:
    """The layout of every parameter by name, tied names included, those of a module under another name left out.

    Raises ValueError where tied parameters disagree.
    """
    layouts: dict[str, Layout] = {}
    first: dict[nn.Parameter, str] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{leaf}".lstrip(".")
            layouts[name] = Layout(mesh, _placements(styles.get(module_name), leaf) if has_tensor_axis(mesh) else {})
            other = first.setdefault(parameter, name)
            if layouts[other] != layouts[name]:
                raise ValueError(
                    f"{other!r} and {name!r} are one tied parameter, but the plan lays them out as "
                    f"({layouts[other]}) and ({layouts[name]}); give both modules styles that agree"
                )
    return layouts


def _placements(style: Style | None, leaf: str) -> dict[str, Shard]:
    match style:
        case ColwiseParallel() | VocabParallel():
            return {TENSOR_AXIS: Shard(0)}
        case RowwiseParallel() if leaf == "weight":
            return {TENSOR_AXIS: Shard(1)}
    return {}
