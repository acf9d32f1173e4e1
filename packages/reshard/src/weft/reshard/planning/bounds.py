"""A lower bound on the elements received by the busiest rank under any plan.

Without a reduction, a rank must receive the elements that it needs and does not hold. An uneven all-to-all attains
this bound.

With a reduction of p addends, no rank holds elements of the sum at the start, so a rank must receive as many elements
as it needs. A second bound counts the messages of all ranks. An element needed by `copies` ranks takes at least p - 1
messages until some rank has the sum, then a message for each other rank: p + copies - 2 in all. There is another
message if no rank that needs the element had an addend. The busiest rank receives at least its share of all messages:
(p - 1) / p of the tensor for a reduce-scatter, 2 (p - 1) / p for an all-reduce (Patarasu and Yuan, 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations").

Where the target is Partial over an axis and the source is not, the value is counted at index 0 of the axis, the index
with the value. Where the source is sharded over the axis, the ranks along the axis may share the elements to receive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from weft.mesh import Layout, Partial, Replicate, Shard
from weft.mesh.extents import overlap, volume

LOOKED_AT = 4096  # ranks inspected; the busiest of the first ranks bounds the busiest of all from below


def lower_bound_elements(src: Layout, dst: Layout, shape: Sequence[int]) -> int:
    """Elements received by the busiest rank from `src` to `dst` under any plan, at least."""
    shape = tuple(shape)
    if src.mesh != dst.mesh:
        return _across(src, dst, shape)
    triples = list(zip(src.mesh.axis_names, src.placements, dst.placements, strict=True))
    reduced = [a for a, p, q in triples if isinstance(p, Partial) and not isinstance(q, Partial)]
    shared = [a for a, p, q in triples if isinstance(p, Shard) and isinstance(q, Partial)]
    if shared:
        return _shared(src, dst, shape, reduced, shared)
    busiest = _needed_and_not_held(src, dst, shape, reduced=bool(reduced))
    if not reduced:
        return busiest
    mesh = src.mesh
    addends = mesh.axis_size(*reduced)
    values = [a for a, p, q in triples if not isinstance(p, Partial) and isinstance(q, Partial)]
    passing = [a for a, p, q in triples if isinstance(p, Partial) and isinstance(q, Partial)]
    if values:
        return busiest
    instances = mesh.axis_size(*passing)
    parts = mesh.axis_size(*(axis for order in dst.shard_order.values() for axis in order))
    copies = mesh.size // instances // parts
    elements = math.prod(shape) * instances
    messages = elements * (addends + copies - 2)
    if mesh.size <= LOOKED_AT:
        already_there = sum(volume(overlap(dst.local_slices(shape, r), src.local_slices(shape, r))) for r in mesh.ranks)
        messages += max(0, elements - already_there)
    return max(busiest, -(-messages // mesh.size))


def _needed_and_not_held(src: Layout, dst: Layout, shape: tuple[int, ...], *, reduced: bool) -> int:
    """The most elements needed and not held by a rank. reduced: held elements are addends, and do not count."""
    most = 0
    for rank in islice(dst.mesh, LOOKED_AT):
        need = dst.local_slices(shape, rank)
        needed = volume(need)
        if needed > most:
            held = 0 if reduced else volume(overlap(need, src.local_slices(shape, rank)))
            most = max(most, needed - held)
    return most


def _across(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    """The bound between two meshes: the elements needed and not held by a rank.

    Where the source must be reduced, all elements needed by a rank count.
    """
    target = dst.replace(**{axis: Replicate() for axis in dst.mesh.axis_names if isinstance(dst[axis], Partial)})
    return _needed_and_not_held(src, target, shape, reduced=src.is_partial())


def _shared(src: Layout, dst: Layout, shape: tuple[int, ...], reduced: list[str], shared: list[str]) -> int:
    """The bound of Shard -> Partial: the ranks along `shared` need together the elements held by none of them."""
    if reduced:
        return 0
    most = 0
    for rank in islice(dst.mesh, LOOKED_AT):
        group = dst.mesh.submesh(rank, *shared)
        assert group is not None, "a rank of the mesh"
        need = dst.local_slices(shape, rank)
        held = sum(volume(overlap(need, src.local_slices(shape, member))) for member in group)
        most = max(most, -(-(volume(need) - held) // group.size))
    return most
