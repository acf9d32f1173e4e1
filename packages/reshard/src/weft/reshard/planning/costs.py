"""What a step costs a rank, exactly: elements received from other ranks, and elements alive at the same time.

all-gather       p - 1 parts padded to the largest, as in a ring
reduce-scatter   the same
all-reduce       a reduce-scatter and an all-gather of the flattened tensor: 2 (p - 1) parts of ceil(n / p) elements
all-to-all, permute, exchange    the messages of `exchange.py`: elements needed and lacked by the rank
reduce-exchange  the messages of the dual exchange, backwards
slice, make-partial, relabel     nothing

Alive at the same time are the step's input, its result, and the executor's send and receive buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.mesh import Layout
from weft.mesh.extents import largest_part

from .exchange import Messages, messages_of, run_of
from .layouts import dual_layout
from .links import Links
from .pricing import sizes_of
from .spec import spec_of
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
    follow,
)


def received_elements(step: Step, layout: Layout, shape: Sequence[int], rank: int) -> int:
    """Elements received by `rank` from other ranks when `step` starts from `layout`."""
    shape = tuple(shape)
    match step:
        case Slice() | MakePartial() | Relabel():
            return 0
        case AllToAll() | Exchange() | Permute():
            return messages_of(layout, follow(step, layout), shape, rank).received_elements
        case ReduceExchange():
            return backwards(layout, step, shape, rank).sent_elements
        case AllReduce() | AllGather() | ReduceScatter():
            if rank not in layout.mesh:
                return 0
            parts = layout.mesh.axis_size(*axes_of(step))
            local = layout.local_shape(shape, rank)
            if isinstance(step, AllReduce):
                return 2 * (parts - 1) * -(-math.prod(local) // parts)
            whole = local if isinstance(step, ReduceScatter) else follow(step, layout).local_shape(shape, rank)
            return (parts - 1) * math.prod(padded_part(step, layout, whole))


def padded_part(step: AllGather | ReduceScatter, layout: Layout, whole: Sequence[int]) -> list[int]:
    """Shape of the largest part gathered or scattered by the step.

    whole: shape of the local tensor after the gather, or before the scatter.
    """
    part = list(whole)
    for axis, dim in zip(axes_of(step), dims_of(step), strict=True):
        part[dim] = largest_part(part[dim], layout.mesh.axis_size(axis))
    return part


def backwards(layout: Layout, step: ReduceExchange, shape: tuple[int, ...], rank: int) -> Messages:
    """The messages of the exchange run backwards by the ReduceExchange."""
    return messages_of(dual_layout(step.target), dual_layout(layout), shape, rank)


def peak_elements(step: Step, layout: Layout, shape: Sequence[int], rank: int) -> int:
    """Elements alive at the same time on `rank` during the step, its input and its result included."""
    shape = tuple(shape)
    after = follow(step, layout)
    held, result = (math.prod(at.local_shape(shape, rank)) for at in (layout, after))
    match step:
        case Relabel():
            return held
        case MakePartial(op="avg", dim=None):
            return held
        case Slice() | MakePartial() | AllReduce():
            return held + result
        case AllGather():
            part = math.prod(padded_part(step, layout, after.local_shape(shape, rank)))
            whole = part + received_elements(step, layout, shape, rank)
            even = whole == result  # otherwise the part is padded first, and padding is cut from a gathered copy
            return held + whole + result if even else held + part + whole + whole + result
        case ReduceScatter():
            part = math.prod(padded_part(step, layout, layout.local_shape(shape, rank)))
            whole = part * layout.mesh.axis_size(*axes_of(step))
            # Parts of several axes are put in order first. For min, max and product the parts are exchanged.
            extra = whole if len(axes_of(step)) > 1 or step.op not in ("sum", "avg") else 0
            return held + extra + (whole + result if whole == held else whole + whole + part + result)
        case ReduceExchange():
            messages = backwards(layout, step, shape, rank).reversed()
        case AllToAll() | Exchange() | Permute():
            messages = messages_of(layout, after, shape, rank)
    is_sent_in_place = run_of((box for _, box in messages.sends), layout.local_slices(shape, rank)) is not None
    is_received_in_place = (
        not isinstance(step, ReduceExchange)  # adds up the received boxes
        and run_of((box for _, box in messages.receives), after.local_slices(shape, rank)) is not None
    )
    sent, received = messages.sent_elements, messages.received_elements
    return held + sent * (not is_sent_in_place) + received * (not is_received_in_place) + result


def seconds_of(step: Step, layout: Layout, shape: tuple[int, ...], itemsize: int, topology: Links) -> float:
    """Time of the step on the busiest rank, as priced by the search.

    Between meshes, by the messages received by each rank.
    """
    after = follow(step, layout)
    if after.mesh != layout.mesh:
        costs = [messages_of(layout, after, shape, rank) for rank in after.mesh.ranks]
        link = topology.between
        return max(len(m.receives) * link.latency + m.received_elements * itemsize / link.bandwidth for m in costs)
    sizes, (src, dst) = sizes_of(layout.mesh, shape, topology), (spec_of(at, len(shape)) for at in (layout, after))
    axes = () if isinstance(step, Targeted) else axes_of(step)
    moved = sizes.traffic(type(step), axes, src, dst, getattr(step, "apart", ()))
    return topology.seconds({axis: (messages, elements * itemsize) for axis, (messages, elements) in moved.items()})
