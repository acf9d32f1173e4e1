"""Specs: for each dim of a tensor, the axes sharding the dim, major first."""

from __future__ import annotations

from collections.abc import Iterable

from weft.mesh import Layout

Spec = tuple[tuple[str, ...], ...]


def spec_of(layout: Layout, ndim: int) -> Spec:
    """The spec of a layout, for a tensor of `ndim` dims."""
    return tuple(layout.shard_order.get(dim, ()) for dim in range(ndim))


def moving(src: Spec, dst: Spec) -> set[str]:
    """The axes over which an exchange moves data.

    In every dim, all axes of either spec after the first axes common to both.
    """
    axes: set[str] = set()
    for a, b in zip(src, dst, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        axes.update(a[same:], b[same:])
    return axes


def cutting(spec: Spec) -> set[str]:
    """All axes that shard a dim."""
    return {axis for order in spec for axis in order}


def appended(spec: Spec, where: Iterable[tuple[str, int | None]] | Iterable[tuple[str, int]]) -> Spec:
    """`spec` with axes added, each as the minor axis of its dim.

    where: pairs of an axis and a dim. A pair without a dim, or whose axis already shards the dim, is skipped.
    """
    orders = [list(order) for order in spec]
    for axis, dim in where:
        if dim is not None and axis not in orders[dim]:
            orders[dim].append(axis)
    return tuple(tuple(order) for order in orders)
