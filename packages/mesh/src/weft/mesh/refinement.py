"""A mesh and one whose axes are parts of its axes, as `unflatten` makes them: layouts of the one said on the other.

Nothing moves between the two: every rank holds what it held.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .layout import Layout, LayoutError
from .placement import Placement, Shard
from .process_mesh import ProcessMesh


@lru_cache(maxsize=1024)
def axes_of(mesh: ProcessMesh, axis: str) -> tuple[str, ...]:
    """The axes of `mesh` that make up `axis`: itself, or its parts, whose names begin with its own, as tp_heads does of tp.

    None where the mesh has neither.
    """
    if axis in mesh.axis_names:
        return (axis,)
    return tuple(name for name in mesh.axis_names if name.startswith(f"{axis}_"))


@lru_cache(maxsize=1024)
def parts_of_axes(fine: ProcessMesh, coarse: ProcessMesh) -> dict[str, tuple[str, ...]] | None:
    """For each axis of `coarse`, major first, the neighbouring axes of `fine` that it is cut into; None where it is not."""
    parts: dict[str, tuple[str, ...]] = {}
    left = list(fine.axis_names)
    for axis, size in zip(coarse.axis_names, coarse.shape, strict=True):
        taken: list[str] = []
        while left and (not taken or fine.axis_size(*taken) < size):
            taken.append(left.pop(0))
        if not taken or fine.axis_size(*taken) != size:
            return None
        parts[axis] = tuple(taken)
    if left:
        return None
    merged = fine
    for axis, taken_ in parts.items():
        merged = merged.flatten(taken_, into=axis) if taken_ != (axis,) else merged
    return parts if merged == coarse else None


@lru_cache(maxsize=65536)
def refined(layout: Layout, fine: ProcessMesh, shape: Sequence[int]) -> Layout:
    """The layout of a tensor of this shape, said on a mesh whose axes are parts of its own.

    Raises LayoutError where `fine` is no such mesh, and where shards are uneven: cut by parts of an axis, they would be others.
    """
    parts = parts_of_axes(fine, layout.mesh)
    if parts is None:
        raise LayoutError(f"{fine} does not come of {layout.mesh} by unflattening axes")
    for dim, axes in layout.resolved(shape).shard_order.items():
        ways = layout.mesh.axis_size(*axes)
        if shape[dim] % ways and any(len(parts[axis]) > 1 for axis in axes):
            raise LayoutError(
                f"dim {dim} of size {shape[dim]} is not cut evenly over {', '.join(map(repr, axes))} of size {ways}, so that "
                f"({layout}) cannot be said on {fine}; pad it to a multiple of {ways}"
            )
    return Layout.in_order(fine, {part: layout[axis] for axis in _in_order(layout) for part in parts[axis]})


@lru_cache(maxsize=65536)
def coarsened(layout: Layout, coarse: ProcessMesh, shape: Sequence[int]) -> Layout | None:
    """The layout of a tensor of this shape, said on a mesh of whose axes its own are parts; None where it cannot be."""
    parts = parts_of_axes(layout.mesh, coarse)
    if parts is None:
        return None
    wanted: dict[str, Placement] = {}
    for own in _in_order(layout):
        axis = next(axis for axis, names in parts.items() if own in names)
        if wanted.setdefault(axis, layout[own]) != layout[own]:
            return None
    found = Layout.in_order(coarse, wanted)
    try:
        same = refined(found, layout.mesh, shape) == layout
    except LayoutError:
        return None
    return found if same else None


def _in_order(layout: Layout) -> list[str]:
    """The axes of its mesh, those that shard a dim together in their order."""
    sharding = [axis for axes in layout.shard_order.values() for axis in axes]
    return [*sharding, *(axis for axis in layout.mesh.axis_names if not isinstance(layout[axis], Shard))]
