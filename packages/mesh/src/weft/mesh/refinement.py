"""Layouts rewritten between a coarse mesh and a fine mesh, which splits axes of the coarse mesh as `unflatten` does.

No data moves: under both layouts every rank holds the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .layout import Layout, LayoutError
from .placement import Placement, Shard
from .process_mesh import ProcessMesh


@lru_cache(maxsize=1024)
def axes_of(mesh: ProcessMesh, axis: str) -> tuple[str, ...]:
    """The axes of `mesh` which make up `axis`: the axis itself, or the parts of the axis.

    The name of a part begins with the axis's name, as tp_heads is a part of tp. Empty where the mesh has neither.
    """
    if axis in mesh.axis_names:
        return (axis,)
    return tuple(name for name in mesh.axis_names if name.startswith(f"{axis}_"))


@lru_cache(maxsize=1024)
def parts_of_axes(fine: ProcessMesh, coarse: ProcessMesh) -> dict[str, tuple[str, ...]] | None:
    """For each axis of `coarse`, the neighbouring axes of `fine` into which the axis is split, major first.

    None where `fine` does not come from `coarse` by splitting axes.
    """
    parts: dict[str, tuple[str, ...]] = {}
    remaining = list(fine.axis_names)
    for axis, size in zip(coarse.axis_names, coarse.shape, strict=True):
        split: list[str] = []
        while remaining and (not split or fine.axis_size(*split) < size):
            split.append(remaining.pop(0))
        if not split or fine.axis_size(*split) != size:
            return None
        parts[axis] = tuple(split)
    if remaining:
        return None
    merged = fine
    for axis, names in parts.items():
        merged = merged.flatten(names, into=axis) if names != (axis,) else merged
    return parts if merged == coarse else None


@lru_cache(maxsize=65536)
def refined(layout: Layout, fine: ProcessMesh, shape: Sequence[int]) -> Layout:
    """The layout of a tensor of this shape, rewritten for the mesh `fine`, which splits axes of the layout's own mesh.

    Raises LayoutError where `fine` does not come from the layout's mesh by splitting axes, and where a split axis
    cuts a dim unevenly: the parts of the axis would cut the dim into different shards.
    """
    parts = parts_of_axes(fine, layout.mesh)
    if parts is None:
        raise LayoutError(f"{fine} does not split axes of {layout.mesh}; make the fine mesh with unflatten")
    for dim, axes in layout.resolved(shape).shard_order.items():
        shards = layout.mesh.axis_size(*axes)
        if shape[dim] % shards and any(len(parts[axis]) > 1 for axis in axes):
            raise LayoutError(
                f"dim {dim} of size {shape[dim]} is not cut evenly over {', '.join(map(repr, axes))} of size {shards}, "
                f"so ({layout}) has no equal on {fine}; pad the dim to a multiple of {shards}"
            )
    return Layout.in_order(fine, {part: layout[axis] for axis in _axes_in_order(layout) for part in parts[axis]})


@lru_cache(maxsize=65536)
def coarsened(layout: Layout, coarse: ProcessMesh, shape: Sequence[int]) -> Layout | None:
    """The layout of a tensor of this shape, rewritten for the mesh `coarse`, whose axes the layout's mesh splits.

    None where no layout on `coarse` gives every rank the same elements.
    """
    parts = parts_of_axes(layout.mesh, coarse)
    if parts is None:
        return None
    placements: dict[str, Placement] = {}
    for part in _axes_in_order(layout):
        axis = next(axis for axis, names in parts.items() if part in names)
        if placements.setdefault(axis, layout[part]) != layout[part]:
            return None
    layout_on_coarse = Layout.in_order(coarse, placements)
    try:
        same = refined(layout_on_coarse, layout.mesh, shape) == layout
    except LayoutError:
        return None
    return layout_on_coarse if same else None


def _axes_in_order(layout: Layout) -> list[str]:
    """The axes of the layout's mesh: first those that shard a dim, in shard order, then the rest."""
    sharding = [axis for axes in layout.shard_order.values() for axis in axes]
    return [*sharding, *(axis for axis in layout.mesh.axis_names if not isinstance(layout[axis], Shard))]
