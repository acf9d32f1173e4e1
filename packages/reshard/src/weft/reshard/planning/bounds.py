"""Elements that some rank must receive whatever the plan.

Without anything to reduce, a rank must receive what it needs and does not hold, and one uneven all-to-all attains it.

With p addends to reduce, an element that `copies` ranks need in the end takes at least p - 1 messages until some rank has
the sum, and then one for each other rank: p + copies - 2, and one more if no rank that needs it had an addend. Of all
these the busiest rank receives its share at least. That is (p - 1) / p of the tensor for a reduce-scatter and 2 (p - 1) / p for an all-reduce (Patarasu and Yuan, 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"). And no rank holds any of the sum before.

A target that is Partial over an axis where the source was not is counted at index 0 of the axis, which holds the value;
where the source is sharded over it, the ranks along it may share what is to be received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from weft.mesh import Layout, Partial, Replicate, Shard
from weft.mesh.extents import overlap, volume

LOOKED_AT = 4096  # ranks: on a larger mesh the first ones are looked at, which bounds the busiest of all as well


def lower_bound_elements(src: Layout, dst: Layout, shape: Sequence[int]) -> int:
    """Elements that the busiest rank receives on the way from `src` to `dst`, at least."""
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
        at_home = sum(volume(overlap(dst.local_slices(shape, r), src.local_slices(shape, r))) for r in mesh.ranks)
        messages += max(0, elements - at_home)
    return max(busiest, -(-messages // mesh.size))


def _needed_and_not_held(src: Layout, dst: Layout, shape: tuple[int, ...], *, reduced: bool) -> int:
    most = 0
    for rank in islice(dst.mesh, LOOKED_AT):
        need = dst.local_slices(shape, rank)
        needed = volume(need)
        if needed > most:
            held = 0 if reduced else volume(overlap(need, src.local_slices(shape, rank)))
            most = max(most, needed - held)
    return most


def _across(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    """Across meshes: what a rank needs and does not hold; all that it needs where the source is to be reduced."""
    target = dst.replace(**{axis: Replicate() for axis in dst.mesh.axis_names if isinstance(dst[axis], Partial)})
    return _needed_and_not_held(src, target, shape, reduced=src.is_partial())


def _shared(src: Layout, dst: Layout, shape: tuple[int, ...], reduced: list[str], shared: list[str]) -> int:
    """Shard -> Partial: the ranks along `shared` need together what none of them holds, and share it."""
    if reduced:
        return 0
    most = 0
    for rank in islice(dst.mesh, LOOKED_AT):
        group = dst.mesh.submesh(rank, *shared)
        assert group is not None, "a rank of the mesh"
        need = dst.local_slices(shape, rank)
        held = sum(volume(overlap(need, src.local_slices(shape, other))) for other in group)
        most = max(most, -(-(volume(need) - held) // group.size))
    return most
