"""Layouts as the planner uses them: duals, layouts of gradients, ops of Partial, and specs.

A spec is a layout without the Partial axes: for each dim of a tensor, the axes sharding the dim, major first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, Placement, Replicate, Shard

ShardSpec = tuple[tuple[str, ...], ...]


def drop_trivial_axes(layout: Layout) -> Layout:
    """The same distribution of data, with Replicate on every axis of size 1."""
    trivial = {
        name: Replicate() for name, size in zip(layout.mesh.axis_names, layout.mesh.shape, strict=True) if size == 1
    }
    return layout.replace(**trivial) if trivial else layout


def partial_axes(layout: Layout) -> list[str]:
    """The axes on which a tensor of this layout is Partial, in the mesh's order."""
    return [axis for axis in layout.mesh.axis_names if isinstance(layout[axis], Partial)]


def replicate_partials(layout: Layout) -> Layout:
    """The layout with Replicate for every Partial. A tensor's gradient is brought to this layout."""
    partial = {
        axis: Replicate()
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if isinstance(placement, Partial)
    }
    return layout.replace(**partial) if partial else layout


cotangent = lru_cache(maxsize=65536)(replicate_partials)  # cached, for backward, which asks for every tensor


def dual_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a value in `layout`: Replicate and Partial("sum") swapped, Shard kept.

    Raises LayoutError for any reduction but a sum.
    """
    swapped: dict[str, Placement] = {}
    for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True):
        if isinstance(placement, Partial):
            if placement.op != "sum":
                raise LayoutError(
                    f"({layout}) has no dual: {placement} on axis {axis!r} is not a sum, and only sums have a "
                    f"backward; reshard to a layout without {placement} outside of autograd"
                )
            swapped[axis] = Replicate()
        elif isinstance(placement, Replicate):
            swapped[axis] = Partial()
    return layout.replace(**swapped)


def check_reductions(src: Layout, dst: Layout, dtype: torch.dtype) -> None:
    """Raise LayoutError where reductions cannot be combined or do not exist for `dtype`.

    A layout may have a single reduction. A change of an axis from a Partial to a different Partial is refused.
    """
    for layout in (src, dst):
        ops = {p.op for p in layout.placements if isinstance(p, Partial)}
        if len(ops) > 1:
            raise LayoutError(
                f"layout ({layout}) mixes the reductions {sorted(ops)}, whose order would matter; use one"
            )
        if "avg" in ops and not (dtype.is_floating_point or dtype.is_complex):
            raise LayoutError(f"({layout}) averages {dtype}, which has no fractions; use Partial('sum')")
        if "sum" in ops and dtype == torch.bool:
            raise LayoutError(f"({layout}) sums {dtype}; use Partial('max') for any, or cast to an integer")
        if ops & {"min", "max"} and dtype.is_complex:
            raise LayoutError(f"({layout}) takes the {min(ops)} of {dtype}, which has no order; use Partial('sum')")
    if src.mesh != dst.mesh:
        return
    for axis, before, after in zip(src.mesh.axis_names, src.placements, dst.placements, strict=True):
        if isinstance(before, Partial) and isinstance(after, Partial) and before != after:
            raise LayoutError(f"axis {axis!r} goes from {before} to {after}; reshard to Replicate() in between")


def reduced_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """The axes over which a change between two layouts on a mesh reduces a Partial value, in the mesh's order."""
    return tuple(
        axis
        for axis, before, after in zip(src.mesh.axis_names, src.placements, dst.placements, strict=True)
        if isinstance(before, Partial) and not isinstance(after, Partial)
    )


def shard_replicated_axes(layout: Layout, shape: Sequence[int], axes: Sequence[str]) -> Layout:
    """`layout` with Shard in place of Replicate on `axes`; a scalar's layout is unchanged.

    An axis shards the first dim whose local size is a multiple of the axis's size, else dim 0. Axes outside the mesh
    are ignored.
    """
    for axis in axes:
        if axis in layout.mesh.axis_names and layout[axis] == Replicate() and shape:
            size = layout.mesh.axis_size(axis)
            local = layout.largest_local_shape(shape)
            dims = [dim for dim, extent in enumerate(local) if extent % size == 0]
            layout = layout.replace(**{axis: Shard(dims[0] if dims else 0)})
    return layout


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The identity `e` of an op, with `op(e, x) == x` for every x of the dtype.

    op: "sum", "product", "min" or "max".
    """
    if op == "sum":
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    info = torch.iinfo(dtype)
    return info.max if op == "min" else info.min


def reduce_parts(op: str, parts: Tensor) -> Tensor:
    """`parts` reduced by `op` over dim 0, in their own dtype."""
    match op:
        case "sum":
            return parts.sum(0, dtype=parts.dtype)
        case "avg":
            return parts.sum(0, dtype=parts.dtype) / parts.shape[0]
        case "product":
            return parts.prod(0, dtype=parts.dtype)
        case "min":
            return parts.amin(0)
        case _:
            return parts.amax(0)


def spec_of(layout: Layout, ndim: int) -> ShardSpec:
    """The spec of a layout, for a tensor of `ndim` dims."""
    return tuple(layout.shard_order.get(dim, ()) for dim in range(ndim))


def moved_axes(src: ShardSpec, dst: ShardSpec) -> set[str]:
    """The axes over which an exchange moves data.

    In every dim, the axes of either spec, after the first axes that both have in common.
    """
    axes: set[str] = set()
    for a, b in zip(src, dst, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        axes.update(a[same:], b[same:])
    return axes


def sharding_axes(spec: ShardSpec) -> set[str]:
    """All axes sharding a dim."""
    return {axis for order in spec for axis in order}


def append_axes(spec: ShardSpec, where: Iterable[tuple[str, int | None]] | Iterable[tuple[str, int]]) -> ShardSpec:
    """`spec` with axes added, each as the minor axis of a dim.

    where: pairs of an axis and a dim. A pair without a dim, or whose axis already shards the dim, is skipped.
    """
    orders = [list(order) for order in spec]
    for axis, dim in where:
        if dim is not None and axis not in orders[dim]:
            orders[dim].append(axis)
    return tuple(tuple(order) for order in orders)
