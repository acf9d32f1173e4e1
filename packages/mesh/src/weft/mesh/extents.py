"""Parts of a tensor: how a dim is cut over an axis, by the arithmetic of `torch.chunk`, and the boxes that result."""

from __future__ import annotations

import math

Box = tuple[slice, ...]  # a part of a tensor: one slice per dim


def largest_part(size: int, parts: int) -> int:
    """Size of the first and largest of `parts` parts of `size` elements."""
    return -(-size // parts)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of `size` elements cut into `parts`.

    Every part has ceil(size / parts) elements, except the last ones, which may be shorter or empty.
    """
    step = largest_part(size, parts)
    return min(size, index * step), min(size, (index + 1) * step)


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod([part.stop - part.start for part in box])


def overlap(a: Box, b: Box) -> Box:
    """Intersection of two boxes; a box of volume 0 where they are disjoint."""
    return tuple([_common(x, y) for x, y in zip(a, b, strict=True)])


def _common(a: slice, b: slice) -> slice:
    # Comparisons take half the time of min() and max(), and planning intersects the boxes of every rank.
    start = a.start if a.start > b.start else b.start
    stop = a.stop if a.stop < b.stop else b.stop
    return slice(start, stop if stop > start else start)
