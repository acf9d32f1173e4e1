"""A spec: dim by dim, which axes shard it, major first."""

from __future__ import annotations

from collections.abc import Iterable

from weft.mesh import Layout

Spec = tuple[tuple[str, ...], ...]


def spec_of(layout: Layout, ndim: int) -> Spec:
    """The spec of a layout, as long as the tensor has dims."""
    return tuple(layout.shard_order.get(dim, ()) for dim in range(ndim))


def moving(src: Spec, dst: Spec) -> set[str]:
    """The axes over which an exchange moves data: all that shard something, but for those that both cut a dim with first."""
    axes: set[str] = set()
    for a, b in zip(src, dst, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        axes.update(a[same:], b[same:])
    return axes


def cutting(spec: Spec) -> set[str]:
    """All axes that shard something."""
    return {axis for order in spec for axis in order}


def appended(spec: Spec, where: Iterable[tuple[str, int | None]] | Iterable[tuple[str, int]]) -> Spec:
    """`spec` with axes put behind those of their dims, the minor ones; an axis of dim None is left out."""
    orders = [list(order) for order in spec]
    for axis, dim in where:
        if dim is not None and axis not in orders[dim]:
            orders[dim].append(axis)
    return tuple(tuple(order) for order in orders)
