"""A box of a global tensor, as the offset and strides of the elements' row-major indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a global tensor: element (i0, i1, ...) of the box has the row-major index offset + sum(i * strides).

    Tells a rank which random numbers to draw. An index has up to 62 bits. An empty box has a size of 0.
    """

    offset: int
    sizes: Ints
    strides: Ints

    @classmethod
    def of(cls, shape: Sequence[int], slices: Sequence[slice] | None = None) -> Part:
        """The box `slices` of a tensor of `shape`, with start and stop for each dim; None means the whole tensor.

        Raises ValueError for a shape of more than 2**62 elements.
        """
        if math.prod(shape) > 2**62:
            raise ValueError(f"a tensor of shape {tuple(shape)} has more than 2**62 elements; draw it in parts")
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        if slices is None:
            return cls(0, tuple(shape), strides)
        offset = sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
        return cls(offset, tuple(part.stop - part.start for part in slices), strides)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def at(self, i: int) -> Part:
        """The sub-box at index `i` of the first dim, without this dim."""
        return Part(self.offset + i * self.strides[0], self.sizes[1:], self.strides[1:])

    def runs(self) -> Part:
        """The same elements in the same order, in as few dims as possible; the last dim has stride 1: a run."""
        return Part(self.offset, *merge(self.sizes, self.strides))


@lru_cache(maxsize=4096)
def merge(sizes: Ints, strides: Ints, *more_strides: Ints) -> tuple[Ints, ...]:
    """Return (sizes, strides, *more_strides) of the same elements in as few dims as possible; the last stride is 1.

    more_strides: further strides of the same dims, as of a tensor in memory. Two dims are merged only where
        all strides allow it.
    """
    if 0 in sizes:
        return ((0,), *((1,) for _ in (strides, *more_strides)))
    dims: list[Ints] = []  # (size, stride, *more_strides)
    for size, *steps in zip(sizes, strides, *more_strides, strict=True):
        if size == 1:
            continue  # the stride of a dim of size 1 does not matter
        if dims and all(outer == size * step for outer, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, *steps)
        else:
            dims.append((size, *steps))
    if not dims or dims[-1][1] != 1:  # runs have one element
        dims.append((1,) * (2 + len(more_strides)))
    return tuple(zip(*dims, strict=True))
