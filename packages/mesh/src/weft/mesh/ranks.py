"""A map from mesh index to rank.

Regular ranks are stored as strides: 131,072 ranks take no more memory than 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Ranks:
    """A map from an index along each axis to a rank; every `ProcessMesh` holds one.

    An index has the number `first + sum(index * stride)`. Without a table, the number is the rank. With a table, the
    number is the position of the rank in the table.

    Equal maps have equal fields, because each map is stored in a single way:
    - A table is used only where an index cannot be read back from the rank, stride by stride. A part of a grid has
      none.
    - An axis of size 1 has stride 0.
    - A table is row-major, and holds the ranks of this map alone.
    """

    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]
    table: tuple[int, ...] | None = None
    _places: dict[int, int] = field(default_factory=dict, compare=False, repr=False)  # rank -> its entry in the table

    @classmethod
    def consecutive(cls, shape: tuple[int, ...], first: int) -> Ranks:
        """The ranks first, first + 1, … in row-major order."""
        return cls._regular(shape, first, _row_major(shape))

    @classmethod
    def listed(cls, shape: tuple[int, ...], ranks: Sequence[int]) -> Ranks:
        """The map of a row-major list of ranks: by strides where the list is regular, else by a table."""
        steps = _row_major(shape)
        strides = [ranks[step] - ranks[0] if size > 1 else 0 for size, step in zip(shape, steps, strict=True)]
        regular = cls._regular(shape, ranks[0], strides)
        if _is_decodable(shape, strides) and tuple(regular) == tuple(ranks):
            return regular
        steps = tuple(step if size > 1 else 0 for size, step in zip(shape, steps, strict=True))
        return cls(shape, 0, steps, tuple(ranks), {rank: place for place, rank in enumerate(ranks)})

    @classmethod
    def _regular(cls, shape: tuple[int, ...], first: int, strides: Sequence[int]) -> Ranks:
        return cls(shape, first, tuple(s if size > 1 else 0 for size, s in zip(shape, strides, strict=True)))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.table is not None:
            return Ranks.listed, (self.shape, self.table)
        return Ranks, (self.shape, self.first, self.strides)

    def __iter__(self) -> Iterator[int]:
        if self.table is not None:
            return iter(self.table)
        return _numbers(self.shape, self.first, self.strides)

    def at(self, index: Sequence[int]) -> int:
        """The rank at `index`, an int per axis."""
        number = self.first + sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        return number if self.table is None else self.table[number]

    def find(self, rank: int) -> tuple[int, ...] | None:
        """The index of `rank` along each axis; None for a rank outside the map."""
        remainder = rank if self.table is None else self._places.get(rank, -1)
        # Count from the smallest number. An axis with a negative stride has its smallest numbers at its last index.
        remainder -= self.first + sum(min(0, (size - 1) * s) for size, s in zip(self.shape, self.strides, strict=True))
        index = [0] * len(self.shape)
        for axis in sorted(range(len(index)), key=lambda axis: -abs(self.strides[axis])):
            if stride := self.strides[axis]:
                index[axis], remainder = divmod(remainder, abs(stride))
                if not 0 <= index[axis] < self.shape[axis]:
                    return None
                if stride < 0:
                    index[axis] = self.shape[axis] - 1 - index[axis]
        return tuple(index) if remainder == 0 else None

    def take(self, picks: Sequence[range | int]) -> Ranks:
        """The ranks at the picked indices; an int drops its axis, a range keeps it."""
        first, shape, strides = self.first, [], []
        for pick, stride in zip(picks, self.strides, strict=True):
            if isinstance(pick, range):
                first += pick.start * stride
                shape.append(len(pick))
                strides.append(pick.step * stride)
            else:
                first += pick * stride
        return self._view(tuple(shape), first, strides)

    def permute(self, axes: Sequence[int]) -> Ranks:
        """The same ranks with the axes in the order `axes`."""
        return self._view(tuple(self.shape[axis] for axis in axes), self.first, [self.strides[axis] for axis in axes])

    def merge(self, start: int, stop: int) -> Ranks:
        """The same ranks with axes `start` to `stop - 1` merged into a single axis; `start` is the major axis."""
        shape = (*self.shape[:start], math.prod(self.shape[start:stop]), *self.shape[stop:])
        merged = list(zip(self.shape, self.strides, strict=True))[start:stop]
        axes = [(size, stride) for size, stride in merged if size > 1]
        if self.table is None and all(outer == size * inner for (_, outer), (size, inner) in pairwise(axes)):
            stride = axes[-1][1] if axes else 0
            return self._regular(shape, self.first, (*self.strides[:start], stride, *self.strides[stop:]))
        return self.listed(shape, tuple(self))

    def split(self, axis: int, sizes: Sequence[int]) -> Ranks:
        """The same ranks with `axis` split into axes of these sizes, major first."""
        shape = (*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        if self.table is not None:
            return self.listed(shape, self.table)
        steps = (self.strides[axis] * step for step in _row_major(sizes))
        return self._regular(shape, self.first, (*self.strides[:axis], *steps, *self.strides[axis + 1 :]))

    def _view(self, shape: tuple[int, ...], first: int, strides: Sequence[int]) -> Ranks:
        if self.table is None:
            return self._regular(shape, first, strides)
        return self.listed(shape, [self.table[number] for number in _numbers(shape, first, strides)])


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of each axis in row-major order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _is_decodable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an index can be read back from its rank, stride by stride.

    For this, each stride must be longer than all shorter strides can reach together.
    """
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _numbers(shape: Sequence[int], first: int, strides: Sequence[int]) -> Iterator[int]:
    """`first + sum(index * stride)` for each index, in row-major order.

    A generator, because callers may take only the first few.
    """
    size, stride = shape[0], strides[0]
    along = range(first, first + size * stride, stride) if stride else (first,)
    if len(shape) == 1:
        yield from along
        return
    for start in along:
        yield from _numbers(shape[1:], start, strides[1:])
