"""What a step costs a rank, exactly: elements received from other ranks, and elements alive at the same time.

all-gather       p - 1 parts padded to the largest, as in a ring
reduce-scatter   the same
all-reduce       a reduce-scatter and an all-gather of the flattened tensor: 2 (p - 1) parts of ceil(n / p) elements
all-to-all, permute, exchange    the messages of `exchange.py`: elements needed and lacked by the rank
reduce-exchange  the messages of the dual exchange, backwards
slice, make-partial, relabel     nothing

Alive at the same time are the step's input, its result, and the executor's send and receive buffers.

`lower_bound_elements` bounds from below the elements which the busiest rank receives under any plan.

Without a reduction, a rank must receive the elements needed and not held. An uneven all-to-all attains this
bound.

With a reduction of p addends, no rank holds elements of the sum at the start, so a rank must receive as many elements
as needed. A second bound counts the messages of all ranks. An element needed by `copies` ranks takes at least p - 1
messages until some rank has the sum, then a message for each further rank: p + copies - 2 in all. There is another
message if no rank needing the element had an addend. The busiest rank receives at least its share of all messages:
(p - 1) / p of the tensor for a reduce-scatter, 2 (p - 1) / p for an all-reduce (Patarasu and Yuan, 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations").

Where the target is Partial over an axis and the source is not, the value is counted at index 0 of the axis: further
indices hold the identity. Where the source is sharded over the axis, the ranks along the axis may share the elements
to receive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from weft.mesh import Layout, Partial, Replicate, Shard
from weft.mesh.extension import largest_part, overlap, volume

from .exchange import Messages, contiguous_run, messages_of
from .layouts import dual_layout, spec_of
from .moves import Links, sizes_of
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Permute,
    ReduceExchange,
    ReduceScatter,
    Relabel,
    Slice,
    Step,
    Targeted,
    axes_of,
    dims_of,
    layout_after,
)

INSPECTED_RANKS = 4096  # ranks inspected; the busiest of the first ranks bounds the busiest of all from below


def received_elements(step: Step, layout: Layout, shape: Sequence[int], rank: int) -> int:
    """Elements received by `rank` from other ranks when `step` starts from `layout`."""
    shape = tuple(shape)
    match step:
        case Slice() | MakePartial() | Relabel():
            return 0
        case AllToAll() | Exchange() | Permute():
            return messages_of(layout, layout_after(step, layout), shape, rank).received_elements
        case ReduceExchange():
            return dual_messages(layout, step, shape, rank).sent_elements
        case AllReduce() | AllGather() | ReduceScatter():
            if rank not in layout.mesh:
                return 0
            parts = layout.mesh.axis_size(*axes_of(step))
            local = layout.local_shape(shape, rank)
            if isinstance(step, AllReduce):
                return 2 * (parts - 1) * -(-math.prod(local) // parts)
            full = local if isinstance(step, ReduceScatter) else layout_after(step, layout).local_shape(shape, rank)
            return (parts - 1) * math.prod(padded_part(step, layout, full))


def padded_part(step: AllGather | ReduceScatter, layout: Layout, full_shape: Sequence[int]) -> list[int]:
    """Shape of the largest part gathered or scattered by the step.

    full_shape: shape of the local tensor after the gather, or before the scatter.
    """
    part = list(full_shape)
    for axis, dim in zip(axes_of(step), dims_of(step), strict=True):
        part[dim] = largest_part(part[dim], layout.mesh.axis_size(axis))
    return part


def dual_messages(layout: Layout, step: ReduceExchange, shape: tuple[int, ...], rank: int) -> Messages:
    """The messages of the ReduceExchange's dual, an Exchange. The step sends them in the opposite direction."""
    return messages_of(dual_layout(step.target), dual_layout(layout), shape, rank)


def peak_elements(step: Step, layout: Layout, shape: Sequence[int], rank: int) -> int:
    """Elements alive at the same time on `rank` during the step, its input and its result included."""
    shape = tuple(shape)
    after = layout_after(step, layout)
    held, result = math.prod(layout.local_shape(shape, rank)), math.prod(after.local_shape(shape, rank))
    match step:
        case Relabel():
            return held
        case MakePartial(op="avg", dim=None):
            return held
        case Slice() | MakePartial() | AllReduce():
            return held + result
        case AllGather():
            part = math.prod(padded_part(step, layout, after.local_shape(shape, rank)))
            padded = part + received_elements(step, layout, shape, rank)
            even = padded == result  # otherwise the part is padded first, and padding is cut from a gathered copy
            return held + padded + result if even else held + part + padded + padded + result
        case ReduceScatter():
            part = math.prod(padded_part(step, layout, layout.local_shape(shape, rank)))
            padded = part * layout.mesh.axis_size(*axes_of(step))
            # Parts of several axes are put in order first. For min, max and product the parts are exchanged.
            extra = padded if len(axes_of(step)) > 1 or step.op not in ("sum", "avg") else 0
            return held + extra + (padded + result if padded == held else padded + padded + part + result)
        case ReduceExchange():
            messages = dual_messages(layout, step, shape, rank).reversed()
        case AllToAll() | Exchange() | Permute():
            messages = messages_of(layout, after, shape, rank)
    is_sent_in_place = contiguous_run((box for _, box in messages.sends), layout.local_slices(shape, rank)) is not None
    is_received_in_place = (
        not isinstance(step, ReduceExchange)  # adds up the received boxes
        and contiguous_run((box for _, box in messages.receives), after.local_slices(shape, rank)) is not None
    )
    sent, received = messages.sent_elements, messages.received_elements
    return held + sent * (not is_sent_in_place) + received * (not is_received_in_place) + result


def seconds_of(step: Step, layout: Layout, shape: tuple[int, ...], itemsize: int, topology: Links) -> float:
    """Time of the step on the busiest rank, as priced by the search.

    Between meshes, by the messages received by each rank.
    """
    after = layout_after(step, layout)
    if after.mesh != layout.mesh:
        costs = [messages_of(layout, after, shape, rank) for rank in after.mesh.ranks]
        link = topology.between
        return max(len(m.receives) * link.latency + m.received_elements * itemsize / link.bandwidth for m in costs)
    sizes, (src, dst) = sizes_of(layout.mesh, shape, topology), (spec_of(at, len(shape)) for at in (layout, after))
    axes = () if isinstance(step, Targeted) else axes_of(step)
    moved = sizes.traffic(type(step), axes, src, dst, getattr(step, "apart", ()))
    return topology.seconds({axis: (messages, elements * itemsize) for axis, (messages, elements) in moved.items()})


def lower_bound_elements(src: Layout, dst: Layout, shape: Sequence[int]) -> int:
    """A lower bound on the elements received by the busiest rank from `src` to `dst` under any plan."""
    shape = tuple(shape)
    if src.mesh != dst.mesh:
        return _bound_between_meshes(src, dst, shape)
    triples = list(zip(src.mesh.axis_names, src.placements, dst.placements, strict=True))
    reduced = [a for a, p, q in triples if isinstance(p, Partial) and not isinstance(q, Partial)]
    shared = [a for a, p, q in triples if isinstance(p, Shard) and isinstance(q, Partial)]
    if shared:
        return _bound_with_shared_axes(src, dst, shape, reduced, shared)
    busiest = _needed_and_not_held(src, dst, shape, reduced=bool(reduced))
    if not reduced:
        return busiest
    mesh = src.mesh
    addends = mesh.axis_size(*reduced)
    values = [a for a, p, q in triples if not isinstance(p, Partial) and isinstance(q, Partial)]
    still_partial = [a for a, p, q in triples if isinstance(p, Partial) and isinstance(q, Partial)]
    if values:
        return busiest
    instances = mesh.axis_size(*still_partial)
    parts = mesh.axis_size(*(axis for order in dst.shard_order.values() for axis in order))
    copies = mesh.size // instances // parts
    elements = math.prod(shape) * instances
    messages = elements * (addends + copies - 2)
    if mesh.size <= INSPECTED_RANKS:
        held_elements = sum(volume(overlap(dst.local_slices(shape, r), src.local_slices(shape, r))) for r in mesh.ranks)
        messages += max(0, elements - held_elements)
    return max(busiest, -(-messages // mesh.size))


def _needed_and_not_held(src: Layout, dst: Layout, shape: tuple[int, ...], *, reduced: bool) -> int:
    """The most elements needed and not held by a rank. reduced: held elements are addends, and do not count."""
    most = 0
    for rank in islice(dst.mesh, INSPECTED_RANKS):
        needed_box = dst.local_slices(shape, rank)
        needed = volume(needed_box)
        if needed > most:
            held = 0 if reduced else volume(overlap(needed_box, src.local_slices(shape, rank)))
            most = max(most, needed - held)
    return most


def _bound_between_meshes(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    """The bound between two meshes: the elements needed and not held by a rank.

    Where the source must be reduced, all elements needed by a rank count.
    """
    target = dst.replace(**{axis: Replicate() for axis in dst.mesh.axis_names if isinstance(dst[axis], Partial)})
    return _needed_and_not_held(src, target, shape, reduced=src.is_partial())


def _bound_with_shared_axes(
    src: Layout, dst: Layout, shape: tuple[int, ...], reduced: list[str], shared: list[str]
) -> int:
    """The bound of Shard -> Partial: the ranks along `shared` need together the elements held by none of them."""
    if reduced:
        return 0
    most = 0
    for rank in islice(dst.mesh, INSPECTED_RANKS):
        group = dst.mesh.submesh(rank, *shared)
        assert group is not None, "a rank of the mesh"
        needed_box = dst.local_slices(shape, rank)
        held = sum(volume(overlap(needed_box, src.local_slices(shape, member))) for member in group)
        most = max(most, -(-(volume(needed_box) - held) // group.size))
    return most
