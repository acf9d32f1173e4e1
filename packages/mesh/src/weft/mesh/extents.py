"""Parts of a tensor: how a dim is cut over an axis, the arithmetic of `torch.chunk`, and the boxes that come of it."""

from __future__ import annotations

import math

Box = tuple[slice, ...]  # of a tensor: one slice per dim


def largest_part(size: int, parts: int) -> int:
    """Size of the first part of `size` elements cut in `parts`."""
    return -(-size // parts)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of `size` elements cut in `parts`.

    Every part has ceil(size / parts) elements, but for the last ones, which may be shorter or empty.
    """
    step = largest_part(size, parts)
    return min(size, index * step), min(size, (index + 1) * step)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod([part.stop - part.start for part in box])


def overlap(a: Box, b: Box) -> Box:
    """The box that two boxes have in common: of volume 0 where they do not meet."""
    return tuple([_common(x, y) for x, y in zip(a, b, strict=True)])


def _common(a: slice, b: slice) -> slice:
    # Comparisons, as calls of min and max take twice the time, and planning overlaps every rank's boxes.
    start = a.start if a.start > b.start else b.start
    stop = a.stop if a.stop < b.stop else b.stop
    return slice(start, stop if stop > start else start)
