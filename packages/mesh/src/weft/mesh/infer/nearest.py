"""Search for the nearest layout of a single tensor that an operation takes, where the tensor's shape is known.

Nearest is the layout with the fewest elements received by the busiest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, product

from ..extents import overlap, volume
from ..layout import Layout
from ..placement import Partial, Placement, Replicate, Shard

CANDIDATES = 2048  # combinations of placements; above, an axis either keeps its placement or replicates
TRIED = 256  # candidates asked about, nearest first; then all is replicated, which every operation takes
COUNTED_RANKS = 16  # ranks whose received elements are counted


def nearest(layout: Layout, shape: tuple[int, ...], takes: Callable[[Layout], bool]) -> Layout:
    """The layout accepted by `takes` that costs the fewest received elements to reach from `layout`.

    Among equally cheap layouts, the fewest axes change. Where `takes` accepts no candidate, all axes replicate.
    """
    replicated = Layout(layout.mesh)
    ranked = sorted(
        dict.fromkeys(_candidates(layout, shape)),
        key=lambda after: (_received(layout, after, shape), sum(after[a] != layout[a] for a in layout.mesh.axis_names)),
    )
    return next((after for after in ranked[:TRIED] if takes(after)), replicated)


def _candidates(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Layouts to try: new placements for the axes that do not replicate now.

    Axes that shard the same dim are tried in their present order and in the mesh's order.
    """
    axes = [axis for axis in layout.mesh.axis_names if not isinstance(layout[axis], Replicate)]
    dims: list[Placement] = [Shard(dim) for dim, size in enumerate(shape) if size > 1]
    options = [list(dict.fromkeys((layout[axis], *dims, Replicate()))) for axis in axes]
    if math.prod(map(len, options)) > CANDIDATES:
        options = [[layout[axis], Replicate()] for axis in axes]
    for placements in islice(product(*options), CANDIDATES):
        chosen = dict(zip(axes, placements, strict=True))
        yield layout.replace(**chosen)
        yield Layout(layout.mesh, chosen)


def _received(before: Layout, after: Layout, shape: tuple[int, ...]) -> float:
    """Elements received by the busiest of the first ranks: elements needed and not held, and those of reductions."""
    return max(
        volume(needed)
        - volume(overlap(needed, before.local_slices(shape, rank)))
        + _reduced(before, after, volume(needed))
        for rank in islice(before.mesh, COUNTED_RANKS)
        for needed in [after.local_slices(shape, rank)]
    )


def _reduced(before: Layout, after: Layout, elements: int) -> float:
    """Elements received by a rank for reductions. elements: the rank's elements after the reductions.

    A reduce-scatter receives p - 1 times its result; an all-reduce receives 2 (p - 1) / p of the tensor.
    """
    total = 0.0
    for axis, size in zip(before.mesh.axis_names, before.mesh.shape, strict=True):
        if isinstance(before[axis], Partial) and before[axis] != after[axis]:
            total += elements * (size - 1) * (1 if isinstance(after[axis], Shard) else 2 / size)
    return total
