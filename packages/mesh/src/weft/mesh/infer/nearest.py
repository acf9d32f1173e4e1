"""The nearest layout of one tensor that an operation takes, where its shape is known: by the bytes that a rank receives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, product

from ..extents import overlap, volume
from ..layout import Layout
from ..placement import Partial, Placement, Replicate, Shard

CANDIDATES = 2048  # of more, an axis shards what it shards or is replicated
TRIED = 256  # of the candidates, nearest first; after them all is replicated, which every operation takes
ASKED = 16  # of the ranks


def nearest(layout: Layout, shape: tuple[int, ...], takes: Callable[[Layout], bool]) -> Layout:
    """Of the layouts that `takes` is true of the one to which the fewest bytes lead; of those the one most like it."""
    whole = Layout(layout.mesh)
    ranked = sorted(
        dict.fromkeys(_candidates(layout, shape)),
        key=lambda after: (_received(layout, after, shape), sum(after[a] != layout[a] for a in layout.mesh.axis_names)),
    )
    return next((after for after in ranked[:TRIED] if takes(after)), whole)


def _candidates(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Layouts in which the axes that do something do something else, those of one dim in the order of now or of the mesh."""
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
    """Elements that the busiest of some ranks receives: what it needs and does not hold, and what a reduction brings."""
    return max(
        volume(needed)
        - volume(overlap(needed, before.local_slices(shape, rank)))
        + _reduced(before, after, volume(needed))
        for rank in islice(before.mesh, ASKED)
        for needed in [after.local_slices(shape, rank)]
    )


def _reduced(before: Layout, after: Layout, elements: int) -> float:
    """A reduce-scatter brings p - 1 parts, an all-reduce twice (p - 1) / p of the whole."""
    total = 0.0
    for axis, size in zip(before.mesh.axis_names, before.mesh.shape, strict=True):
        if isinstance(before[axis], Partial) and before[axis] != after[axis]:
            total += elements * (size - 1) * (1 if isinstance(after[axis], Shard) else 2 / size)
    return total
