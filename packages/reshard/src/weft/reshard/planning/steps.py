"""The steps of plans. `layout_after` gives the layout after a step, and `dual` the step of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.mesh import Layout, LayoutError, Partial, Placement, Replicate, Shard

from .layouts import drop_trivial_axes, dual_layout

AxisOrAxes = str | tuple[str, ...]
Dim = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """Shard -> Replicate: AllGather("tp", 0), or over several axes at once: AllGather(("dp", "tp"), (0, 1))."""

    axis: AxisOrAxes  #: the axes, in the order in which they shard their dims, major first
    dim: Dim  #: the dim of each axis
    #: empty for a single collective over all axes. Otherwise each axis has a separate collective, in this order.
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Partial(op) -> Replicate, over an axis or over several axes in a single collective."""

    axis: AxisOrAxes
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Partial(op) -> Shard: the dual of AllGather, with the same axes and dims."""

    axis: AxisOrAxes  #: as in AllGather
    dim: Dim  #: as in AllGather
    op: str = "sum"
    #: empty for a single collective over all axes. Otherwise each axis has a separate collective, in this order.
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Shard(src_dim) -> Shard(dst_dim)."""

    axis: str
    src_dim: int
    dst_dim: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Replicate -> Shard(dim): each rank keeps a part, without communication."""

    axis: str
    dim: int


@dataclass(frozen=True, slots=True)
class MakePartial:
    """Replicate or Shard(dim) -> Partial(op), without communication.

    From Replicate, the rank at index 0 keeps the value and all other ranks hold the op's identity; for "avg" all
    ranks keep the value.
    From Shard(dim), the local tensor grows to the size without this shard: the rank's part stays in place, and the
    op's identity is everywhere else.
    """

    axis: str
    op: str = "sum"
    dim: int | None = None  #: of Shard(dim); None: from Replicate


@dataclass(frozen=True, slots=True)
class Exchange:
    """Any layout of Replicate and Shard -> `target`, on this mesh or another. Each rank gets the elements it lacks.

    A single uneven all-to-all; `exchange.py` decides which rank sends what.
    """

    target: Layout


@dataclass(frozen=True, slots=True)
class Permute:
    """An Exchange in which every rank's whole part goes to a single rank."""

    target: Layout


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Any layout of Partial("sum") and Shard -> `target`: the dual of Exchange.

    The dual Exchange's messages go in the opposite direction, and each rank sums the elements received.
    """

    target: Layout


@dataclass(frozen=True, slots=True)
class Relabel:
    """A change to `target` on another mesh, where every rank holds the same elements as before; no communication."""

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
Targeted = Exchange | Permute | ReduceExchange | Relabel  # steps with a `target`, the layout after the step
Local = Slice | MakePartial | Relabel  # steps without communication


def axes_of(step: AllGather | AllReduce | ReduceScatter | AllToAll | Slice | MakePartial) -> tuple[str, ...]:
    """The axes changed by a step, as a tuple."""
    return (step.axis,) if isinstance(step.axis, str) else step.axis


def dims_of(step: AllGather | ReduceScatter) -> tuple[int, ...]:
    """The dims gathered or scattered by a step, a dim per axis."""
    return (step.dim,) if isinstance(step.dim, int) else step.dim


def _placement_changes(step: Step) -> list[tuple[str, Placement, Placement]]:
    """For each axis changed by the step: (axis, placement before, placement after). Empty for a Targeted step."""
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
        case MakePartial(axis=axis, op=op, dim=source_dim):
            return [(axis, Replicate() if source_dim is None else Shard(source_dim), Partial(op))]
        case Exchange() | Permute() | ReduceExchange() | Relabel():
            return []


def layout_after(step: Step, layout: Layout) -> Layout:
    """The layout after the step. Raises LayoutError where the step cannot start from `layout`."""
    if isinstance(step, Targeted):
        return step.target
    changes = _placement_changes(step)
    for axis, before, _ in changes:
        if layout[axis] != before:
            raise LayoutError(f"{step} starts from {before} on axis {axis!r}, but the layout is ({layout})")
    for dim in {before.dim for _, before, _ in changes if isinstance(before, Shard)}:
        axes = tuple(axis for axis, before, _ in changes if before == Shard(dim))
        if layout.shard_order[dim][-len(axes) :] != axes:
            minor = f"axis {axes[0]!r} is not the minor axis" if len(axes) == 1 else f"{axes} are not the minor axes"
            raise LayoutError(f"{step}: {minor} of dim {dim} in ({layout})")
    return layout.replace(**{axis: after for axis, _, after in changes})


def dual(step: Step, before: Layout) -> Step:
    """The step of the gradients: the transpose of `step` as a linear map, for `Plan.transpose`.

    before: the layout at the start of `step`. Raises LayoutError for a step to a `target` from a reduction other than
    a sum.
    """
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
    duals: dict[type[Step], Callable[[Layout], Step]] = {
        Exchange: ReduceExchange,
        ReduceExchange: Exchange,
        Permute: Permute,
        Relabel: Relabel,
    }
    return duals[type(step)](drop_trivial_axes(dual_layout(before)))
