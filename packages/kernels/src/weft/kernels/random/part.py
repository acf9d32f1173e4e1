"""Which elements of a global tensor a rank draws: a box, as offset and strides of their row-major indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a global tensor: element (i0, i1, …), i < sizes, has the row-major index offset + sum(i * strides).

    An index has up to 62 bits. A box without elements has a size of 0.
    """

    offset: int
    sizes: Ints
    strides: Ints

    @classmethod
    def of(cls, shape: Sequence[int], slices: Sequence[slice] | None = None) -> Part:
        """The elements within `slices`, one a dim with start and stop, of a tensor of `shape`; all of them without.

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
        """How many elements."""
        return math.prod(self.sizes)

    def at(self, i: int) -> Part:
        """The elements at `i` of the first dim."""
        return Part(self.offset + i * self.strides[0], self.sizes[1:], self.strides[1:])

    def runs(self) -> Part:
        """The same elements in the same order in as few dims as can be, the last a run of neighbours: stride 1."""
        return Part(self.offset, *merge(self.sizes, self.strides))


@lru_cache(maxsize=4096)
def merge(sizes: Ints, strides: Ints, *others: Ints) -> tuple[Ints, ...]:
    """(sizes, strides, *others) of the same elements in as few dims as can be, the last with 1 in `strides`.

    others: further strides of the same dims, such as those of a tensor in memory; dims merge only where they do in all.
    """
    if 0 in sizes:
        return ((0,), *((1,) for _ in (strides, *others)))
    dims: list[Ints] = []  # (size, stride, *others)
    for size, *steps in zip(sizes, strides, *others, strict=True):
        if size == 1:
            continue  # any stride
        if dims and all(outer == size * step for outer, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, *steps)
        else:
            dims.append((size, *steps))
    if not dims or dims[-1][1] != 1:  # runs of one element
        dims.append((1,) * (2 + len(others)))
    return tuple(zip(*dims, strict=True))
