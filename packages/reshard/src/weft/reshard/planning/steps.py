"""The steps a plan is made of: what each changes, in which order axes may be named, and what it is the dual of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.mesh import Layout, LayoutError, Partial, Placement, Replicate, Shard

from .layouts import dual_layout, without_trivial_axes

Axis = str | tuple[str, ...]
Dim = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """Shard -> Replicate: AllGather("tp", 0), or over several axes in one collective: AllGather(("dp", "tp"), (0, 1)).

    axis: the axes in the order in which they shard their dims, major first; dim: one for each.
    apart: the same axes in another order: one collective for each, in that order, instead of one for all.
    """

    axis: Axis
    dim: Dim
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Partial(op) -> Replicate, on one axis or on several in one collective."""

    axis: Axis
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Partial(op) -> Shard: the dual of AllGather, its axes named alike; `apart` is the order of the collectives."""

    axis: Axis
    dim: Dim
    op: str = "sum"
    apart: tuple[str, ...] = ()


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
    """Replicate or Shard(dim) -> Partial(op), and nothing moves.

    Replicate: the value stays at index 0, the other ranks hold the operation's identity ("avg": all keep it).
    Shard(dim): every rank keeps its part, in its place among the operation's identity.
    """

    axis: str
    op: str = "sum"
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Any layout of {Replicate, Shard} -> `target`, on this mesh or another: each rank gets what it needs and lacks.

    One uneven all-to-all; who sends what is in `exchange.py`.
    """

    target: Layout


@dataclass(frozen=True, slots=True)
class Permute:
    """An Exchange in which every rank's part goes, whole, to one rank."""

    target: Layout


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Layouts of {Partial("sum"), Shard} -> `target`: the dual of an Exchange, its messages sent back and summed."""

    target: Layout


@dataclass(frozen=True, slots=True)
class Relabel:
    """`target` on another mesh says of every rank what it holds already; nothing moves."""

    target: Layout


Step = (
    AllGather
    | AllReduce
    | ReduceScatter
    | AllToAll
    | Slice
    | MakePartial
    | Exchange
    | Permute
    | ReduceExchange
    | Relabel
)
Targeted = Exchange | Permute | ReduceExchange | Relabel
Local = Slice | MakePartial | Relabel  # nothing travels


def axes_of(step: AllGather | AllReduce | ReduceScatter | AllToAll | Slice | MakePartial) -> tuple[str, ...]:
    """The axes a step changes, as a tuple."""
    return (step.axis,) if isinstance(step.axis, str) else step.axis


def dims_of(step: AllGather | ReduceScatter) -> tuple[int, ...]:
    """The dims a step gathers or scatters, one for each of its axes."""
    return (step.dim,) if isinstance(step.dim, int) else step.dim


def before_and_after(step: Step) -> list[tuple[str, Placement, Placement]]:
    """Per axis the step changes, in its order: the placements on either side of it."""
    match step:
        case AllGather():
            return [(axis, Shard(dim), Replicate()) for axis, dim in zip(axes_of(step), dims_of(step), strict=True)]
        case AllReduce(op=op):
            return [(axis, Partial(op), Replicate()) for axis in axes_of(step)]
        case ReduceScatter(op=op):
            return [(axis, Partial(op), Shard(dim)) for axis, dim in zip(axes_of(step), dims_of(step), strict=True)]
        case AllToAll(axis=axis, src_dim=src, dst_dim=dst):
            return [(axis, Shard(src), Shard(dst))]
        case Slice(axis=axis, dim=dim):
            return [(axis, Replicate(), Shard(dim))]
        case MakePartial(axis=axis, op=op, dim=made_of):
            return [(axis, Replicate() if made_of is None else Shard(made_of), Partial(op))]
        case Exchange() | Permute() | ReduceExchange() | Relabel():
            return []


def follow(step: Step, layout: Layout) -> Layout:
    """The layout after the step; LayoutError where the step does not start from `layout`."""
    if isinstance(step, Targeted):
        return step.target
    changes = before_and_after(step)
    for axis, before, _ in changes:
        if layout[axis] != before:
            raise LayoutError(f"{step} starts from {before} on axis {axis!r}, but the layout is ({layout})")
    for dim in {before.dim for _, before, _ in changes if isinstance(before, Shard)}:
        named = tuple(axis for axis, before, _ in changes if before == Shard(dim))
        if layout.shard_order[dim][-len(named) :] != named:
            minor = f"axis {named[0]!r} is not the minor one that shards" if len(named) == 1 else f"{named} do not end"
            raise LayoutError(f"{step}: {minor} dim {dim} in ({layout})")
    return layout.replace(**{axis: after for axis, _, after in changes})


def dual(step: Step, before: Layout) -> Step:
    """The step's transpose as a linear map; `before` is the layout the step starts from."""
    match step:
        case AllGather(axis=axis, dim=dim, apart=apart):
            return ReduceScatter(axis, dim, "sum", tuple(reversed(apart)))
        case ReduceScatter(axis=axis, dim=dim, apart=apart):
            return AllGather(axis, dim, tuple(reversed(apart)))
        case AllToAll(axis=axis, src_dim=src, dst_dim=dst):
            return AllToAll(axis, dst, src)
        case Slice(axis=axis, dim=dim):
            return MakePartial(axis, "sum", dim)
        case MakePartial(axis=axis, dim=int(dim)):
            return Slice(axis, dim)
        case AllReduce() | MakePartial():
            return step
    other: dict[type[Step], Callable[[Layout], Step]] = {
        Exchange: ReduceExchange,
        ReduceExchange: Exchange,
        Permute: Permute,
        Relabel: Relabel,
    }
    return other[type(step)](without_trivial_axes(dual_layout(before)))
