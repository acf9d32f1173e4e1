"""A tensor's parts in two arrangements: stacked, as in a collective, and side by side, as in the tensor.

Parts are padded to equal shapes for the collective. The executor and buckets.py (gradients) use this;
gathering.py (parameters) uses only `stacking_of` and `pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ..planning.steps import AllGather, ReduceScatter, axes_of, dims_of
from ..world.world import Positions


def padded(local: Tensor, shape: Sequence[int]) -> Tensor:
    """`local`, contiguous, padded with zeros at the end of each dim up to `shape`."""
    if list(local.shape) == list(shape):
        return local.contiguous()
    larger = local.new_zeros(shape)
    larger[tuple(slice(size) for size in local.shape)] = local
    return larger


def cut_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """A padded part without its padding: the first `shape[i]` elements of each dim i."""
    if tuple(part.shape) != tuple(shape):
        part = part[tuple([slice(size) for size in shape])]
    return part.contiguous()


@dataclass(frozen=True, slots=True)
class Stacking:
    """How equal parts of a tensor are stacked along mesh axes; made by `stacking_of`."""

    part: tuple[int, ...]  # shape of each part
    sizes: tuple[int, ...]  # of the mesh axes, in stacking order
    whole: tuple[int, ...]  # shape of the tensor, padded to whole parts
    along: tuple[tuple[int, ...], ...]  # for each dim, the positions in `sizes` of the axes that cut it, major first

    split: tuple[int, ...]  # `whole`, each dim split into the sizes of the axes that cut it and the part's size
    order: tuple[int, ...]  # the dims of [*sizes, *part] in the order of `split`

    @property
    def is_of_rows(self) -> bool:
        """Whether no dim but the first is cut; then each part is a contiguous run of rows."""
        return not any(self.along[1:])

    def of_whole(self, whole: Tensor) -> Tensor:
        """A view of a tensor of shape `whole` as its stacked parts: [*sizes, *part]."""
        return whole.reshape(self.split).permute([self.order.index(dim) for dim in range(len(self.order))])

    def side_by_side(self, stacked: Tensor) -> Tensor:
        """The tensor of shape `whole` made of stacked parts; a copy where the parts' rows are interleaved.

        stacked: of any shape, with the elements of [*sizes, *part] in order.
        """
        return stacked.view(*self.sizes, *self.part).permute(self.order).reshape(self.whole)

    def pairs(self, rows: Tensor, tensor: Tensor, positions: Positions) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views, of `rows` and `tensor`, with the same elements, for copying between the two; without padding.

        rows: [parts, elements of a part]. tensor: contiguous, no larger than `whole`. positions: of the part in each
            row.
        """
        if tuple(tensor.shape) == self.whole and isinstance(positions, range):
            yield rows.view(*self.sizes, *self.part), self.of_whole(tensor)
            return
        for row, position in zip(rows, positions, strict=True):
            starts = [index * size for index, size in zip(self._indices(position), self.part, strict=True)]
            stops = [min(a + size, end) for a, size, end in zip(starts, self.part, tensor.shape, strict=True)]
            if all(a < b for a, b in zip(starts, stops, strict=True)):
                held = tuple(slice(b - a) for a, b in zip(starts, stops, strict=True))
                yield row.view(self.part)[held], tensor[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))]

    def _indices(self, position: int) -> list[int]:
        """The index along each dim, in parts, of the part at a position."""
        coordinate = [position // math.prod(self.sizes[axis + 1 :]) % size for axis, size in enumerate(self.sizes)]
        found = []
        for axes in self.along:
            index = 0
            for axis in axes:
                index = index * self.sizes[axis] + coordinate[axis]
            found.append(index)
        return found


@lru_cache(maxsize=65536)
def stacking_of(
    part: tuple[int, ...], leading: tuple[str, ...], sizes: tuple[int, ...], step: AllGather | ReduceScatter
) -> Stacking:
    """How parts of shape `part` are stacked along `leading` axes, before `step` scatters or after `step` gathers.

    leading, sizes: the mesh axes in stacking order, outermost first, and their sizes.
    """
    along = tuple(tuple(leading.index(axis) for axis in _axes_over(step, dim)) for dim in range(len(part)))
    whole = tuple(size * math.prod(sizes[axis] for axis in axes) for size, axes in zip(part, along, strict=True))
    order = [dim for inner, axes in enumerate(along) for dim in (*axes, len(sizes) + inner)]
    split = [(*sizes, *part)[dim] for dim in order]
    return Stacking(part, sizes, whole, along, tuple(split), tuple(order))


def _axes_over(step: AllGather | ReduceScatter, dim: int) -> list[str]:
    return [axis for axis, over in zip(axes_of(step), dims_of(step), strict=True) if over == dim]
