"""Functions of layouts for resharding: duals, layouts of gradients, checks of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from weft.mesh import Layout, LayoutError, Partial, Placement, Replicate, Shard


def without_trivial_axes(layout: Layout) -> Layout:
    """The same distribution of data, with Replicate on every axis of size 1."""
    trivial = {
        name: Replicate() for name, size in zip(layout.mesh.axis_names, layout.mesh.shape, strict=True) if size == 1
    }
    return layout.replace(**trivial) if trivial else layout


def without_partial(layout: Layout) -> Layout:
    """The layout with Replicate for every Partial. A tensor's gradient is brought to this layout."""
    partial = {
        axis: Replicate()
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if isinstance(placement, Partial)
    }
    return layout.replace(**partial) if partial else layout


cotangent = lru_cache(maxsize=65536)(without_partial)  # cached, for backward, which asks for every tensor


def dual_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a value in `layout`: Replicate and Partial("sum") swapped, Shard kept.

    Raises LayoutError for a reduction that is not a sum.
    """
    swapped: dict[str, Placement] = {}
    for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True):
        if isinstance(placement, Partial):
            if placement.op != "sum":
                raise LayoutError(f"({layout}) has no dual: {placement} on axis {axis!r} is not a sum")
            swapped[axis] = Replicate()
        elif isinstance(placement, Replicate):
            swapped[axis] = Partial()
    return layout.replace(**swapped)


def check_reductions(src: Layout, dst: Layout, dtype: torch.dtype) -> None:
    """Raise LayoutError where reductions cannot be combined or do not exist for `dtype`.

    A layout may have a single reduction. On an axis, a change from one Partial to another is refused.
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


def sharded_over(layout: Layout, shape: Sequence[int], axes: Sequence[str]) -> Layout:
    """`layout` with Shard on each of `axes` that replicates; a scalar's layout is unchanged.

    An axis shards the first dim that it divides evenly; where there is none, dim 0. Axes outside the mesh are ignored.
    """
    for axis in axes:
        if axis in layout.mesh.axis_names and layout[axis] == Replicate() and shape:
            size = layout.mesh.axis_size(axis)
            local = layout.largest_local_shape(shape)
            dims = [dim for dim, extent in enumerate(local) if extent % size == 0]
            layout = layout.replace(**{axis: Shard(dims[0] if dims else 0)})
    return layout
