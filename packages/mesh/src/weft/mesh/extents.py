"""How a dim is cut over an axis: the arithmetic of `torch.chunk`."""

from __future__ import annotations


def largest_part(size: int, parts: int) -> int:
    """Size of the first part of `size` elements cut in `parts`."""
    return -(-size // parts)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of `size` elements cut in `parts`.

    Every part has ceil(size / parts) elements, but for the last ones, which may be shorter or empty.
    """
    step = largest_part(size, parts)
    return min(size, index * step), min(size, (index + 1) * step)
