"""How a dim is cut over an axis: the arithmetic of `torch.chunk`."""

from __future__ import annotations


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` of `size` elements cut in `parts`.

    Every part has ceil(size / parts) elements, but for the last ones, which may be shorter or empty.
    """
    step = -(-size // parts)
    return min(size, index * step), min(size, (index + 1) * step)


def chunk_sizes(size: int, parts: int) -> list[int]:
    """Sizes of all parts, in order."""
    return [stop - start for start, stop in (chunk(size, parts, index) for index in range(parts))]
