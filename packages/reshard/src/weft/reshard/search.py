"""The cheapest way from one layout to another: Dijkstra over single-axis steps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import count

from weft.mesh import Layout, LayoutError, Partial, Replicate, Shard

from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    follow,
    received_elements,
)

SCATTERED = ("sum", "avg")  # a reduce-scatter exists for these on every backend; others all-reduce, then slice


def cheapest(src: Layout, dst: Layout, shape: Sequence[int]) -> tuple[Step, ...]:
    """Steps from `src` to `dst` with the fewest elements received on any rank, padding included, then the fewest steps.

    Raises LayoutError for reductions that cannot be told apart: different Partial operations in one layout, or one
    operation made into another.
    """
    _check(src, dst)
    order = count()  # breaks ties by insertion, which the loops below fix: the same plan on every rank
    frontier: list[tuple[int, int, int, Layout, tuple[Step, ...]]] = [(0, 0, next(order), src, ())]
    done: set[Layout] = set()
    while frontier:
        elements, length, _, layout, steps = heapq.heappop(frontier)
        if layout == dst:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in _moves(layout, dst, len(shape)):
            cost = elements + _most_received(step, layout, shape)
            heapq.heappush(frontier, (cost, length + 1, next(order), follow(step, layout), (*steps, step)))
    raise LayoutError(f"no steps lead from ({src}) to ({dst})")


def _moves(layout: Layout, dst: Layout, ndim: int) -> Iterator[Step]:
    for axis, size in zip(layout.mesh.axis_names, layout.mesh.shape, strict=True):
        placement = layout[axis]
        if size == 1:
            continue
        if isinstance(placement, Shard):
            if layout.shard_order[placement.dim][-1] == axis:
                yield AllGather(axis, placement.dim)
                yield from (AllToAll(axis, placement.dim, dim) for dim in range(ndim) if dim != placement.dim)
        elif isinstance(placement, Partial):
            if placement.op in SCATTERED:
                yield from (ReduceScatter(axis, dim, placement.op) for dim in range(ndim))
            yield AllReduce(axis, placement.op)
        else:
            yield from (Slice(axis, dim) for dim in range(ndim))
            if isinstance(wanted := dst[axis], Partial) and not _reduces_otherwise(layout, wanted):
                yield MakePartial(axis, wanted.op)


def _most_received(step: Step, layout: Layout, shape: Sequence[int]) -> int:
    """Elements that no rank receives more of: what the first one does, as its part is the largest in every layout.

    In an uneven all-to-all a rank that held less receives more, so that one is priced as if it were padded.
    """
    first = layout.mesh.ranks[0]
    if not isinstance(step, AllToAll):
        return received_elements(step, layout, shape, first)
    size = layout.mesh.axis_size(step.axis)
    local = layout.local_shape(shape, first)
    columns = -(-local[step.dst_dim] // size)
    return (size - 1) * columns * math.prod(local[: step.dst_dim] + local[step.dst_dim + 1 :])


def _reduces_otherwise(layout: Layout, wanted: Partial) -> bool:
    """Whether `layout` waits for another reduction, which could change the identity: a sum of ones is no longer 1."""
    return any(isinstance(placement, Partial) and placement != wanted for placement in layout.placements)


def without_trivial_axes(layout: Layout) -> Layout:
    """The same placement of data, with axes of size 1 written as replicated."""
    trivial = {
        name: Replicate() for name, size in zip(layout.mesh.axis_names, layout.mesh.shape, strict=True) if size == 1
    }
    return layout.replace(**trivial)


def _check(src: Layout, dst: Layout) -> None:
    for layout in (src, dst):
        ops = {p.op for p in layout.placements if isinstance(p, Partial)}
        if len(ops) > 1:
            raise LayoutError(
                f"layout ({layout}) mixes the reductions {sorted(ops)}, whose order would matter; use one"
            )
    for axis, before, after in zip(src.mesh.axis_names, src.placements, dst.placements, strict=True):
        if isinstance(before, Partial) and isinstance(after, Partial) and before != after:
            raise LayoutError(f"axis {axis!r} goes from {before} to {after}; reshard to Replicate() in between")
