"""The steps a plan is made of: each changes one placement on one axis, and says what it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.mesh import Layout, LayoutError, Partial, Placement, Replicate, Shard
from weft.mesh.extents import chunk


@dataclass(frozen=True, slots=True)
class AllGather:
    """Shard(dim) -> Replicate."""

    axis: str
    dim: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Partial(op) -> Replicate."""

    axis: str
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Partial(op) -> Shard(dim)."""

    axis: str
    dim: int
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Shard(src_dim) -> Shard(dst_dim)."""

    axis: str
    src_dim: int
    dst_dim: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Replicate -> Shard(dim): each rank keeps its part, nothing moves."""

    axis: str
    dim: int


@dataclass(frozen=True, slots=True)
class MakePartial:
    """Replicate -> Partial(op): the value stays at index 0, the other ranks hold the operation's identity."""

    axis: str
    op: str = "sum"


Step = AllGather | AllReduce | ReduceScatter | AllToAll | Slice | MakePartial


def before_and_after(step: Step) -> tuple[Placement, Placement]:
    """The placements of the step's axis on either side of it."""
    match step:
        case AllGather(dim=dim):
            return Shard(dim), Replicate()
        case AllReduce(op=op):
            return Partial(op), Replicate()
        case ReduceScatter(dim=dim, op=op):
            return Partial(op), Shard(dim)
        case AllToAll(src_dim=src, dst_dim=dst):
            return Shard(src), Shard(dst)
        case Slice(dim=dim):
            return Replicate(), Shard(dim)
        case MakePartial(op=op):
            return Replicate(), Partial(op)


def follow(step: Step, layout: Layout) -> Layout:
    """The layout after the step; LayoutError where the step does not start from `layout`."""
    before, after = before_and_after(step)
    if layout[step.axis] != before:
        raise LayoutError(f"{step} starts from {before} on axis {step.axis!r}, but the layout is ({layout})")
    if isinstance(before, Shard) and layout.shard_order[before.dim][-1] != step.axis:
        raise LayoutError(f"{step}: axis {step.axis!r} is not the minor one that shards dim {before.dim} in ({layout})")
    return layout.replace(**{step.axis: after})


def received_elements(step: Step, layout: Layout, shape: Sequence[int], rank: int) -> int:
    """Elements that arrive at `rank` from other ranks when `step` starts from `layout`.

    all-to-all: what the rank has after the step and had not before.
    all-gather, reduce-scatter: p - 1 chunks of the padded tensor, as in a ring; all-reduce: a reduce-scatter and an
    all-gather of the flattened tensor, 2 (p - 1) chunks of ceil(n / p) elements.
    """
    size = layout.mesh.axis_size(step.axis)
    if size == 1 or isinstance(step, Slice | MakePartial) or rank not in layout.mesh:
        return 0
    local = layout.local_shape(shape, rank)
    if isinstance(step, AllReduce):
        return 2 * (size - 1) * -(-math.prod(local) // size)
    after = follow(step, layout).local_shape(shape, rank)
    if isinstance(step, AllGather | ReduceScatter):
        whole = local if isinstance(step, ReduceScatter) else after
        rows = -(-whole[step.dim] // size)
        return (size - 1) * rows * math.prod(whole[: step.dim] + whole[step.dim + 1 :])
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None, "checked above: the rank is in the mesh"
    start, stop = chunk(local[step.dst_dim], size, coordinate[step.axis])
    kept = (stop - start) * math.prod(local[: step.dst_dim] + local[step.dst_dim + 1 :])
    return math.prod(after) - kept
