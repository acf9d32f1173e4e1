"""Checks that a tensor's parts in a manifest cover the tensor exactly once. Nothing here needs torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

# The most elements of a tensor: torch counts elements in 64 bits.
_MOST_ELEMENTS = 2**62
_MOST_DIMS = 64  # torch's own bound
# The most dims cut by the parts of a tensor. Each axis of a mesh cuts one dim, and meshes have fewer axes.
_MOST_CUT = 8

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, and a shape


def uncovered(shape: tuple[int, ...], parts: Sequence[Box]) -> str | None:
    """Why the parts do not cover a tensor of this shape exactly once, in words; None if the parts do.

    Method: give each box a signed count at each corner. The counts of the parts add up to the counts of the whole
    tensor exactly if the parts cover each element once, because a box's corners determine its indicator function
    (mixed differences over all dims lose nothing of a function with bounded support). This takes 2**d steps a part,
    for parts that cut d dims.
    """
    if not _is_size(shape):
        return f"its shape {_shown(shape)} is not the shape of a tensor"
    for offsets, sizes in parts:
        if len(offsets) != len(shape) or len(sizes) != len(shape) or not _is_size(sizes):
            return (
                f"the part at {_shown(offsets)} of shape {_shown(sizes)} does not fit a tensor of shape {_shown(shape)}"
            )
        if any(not 0 <= start <= whole - size for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"the part at {_shown(offsets)} of shape {_shown(sizes)} reaches beyond the shape {_shown(shape)}"
    if not math.prod(shape):
        return None
    cut = [dim for dim, whole in enumerate(shape) if any(sizes[dim] != whole for _, sizes in parts)]
    if len(cut) > _MOST_CUT:
        return f"its parts cut {len(cut)} dims, and {_MOST_CUT} may be cut at most"
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [(-1, ((0,) * len(shape), shape)), *((1, part) for part in parts)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    if any(corners.values()):
        return f"its {len(parts)} parts do not cover the shape {_shown(shape)} exactly once"
    return None


def _is_size(shape: Sequence[int]) -> bool:
    if len(shape) > _MOST_DIMS or not all(0 <= size <= _MOST_ELEMENTS for size in shape):
        return False
    return math.prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS


def _shown(sizes: Sequence[int]) -> str:
    listed = [str(size) if abs(size) < 10**20 else "…" for size in sizes[:8]]
    return f"[{', '.join([*listed, *['…'] * (len(sizes) > 8)])}]"
