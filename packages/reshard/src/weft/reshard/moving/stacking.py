"""A tensor's parts in two arrangements: stacked, as in a collective, and side by side, as in the tensor.

Parts are padded to equal shapes for the collective. Used by the executor, by buckets.py (gradients), and by
gathering.py (parameters).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ..planning.steps import AllGather, ReduceScatter, axes_of, dims_of
from ..world.world import Positions


def pad(local: Tensor, shape: Sequence[int]) -> Tensor:
    """`local`, contiguous, padded with zeros at the end of each dim up to `shape`."""
    if list(local.shape) == list(shape):
        return local.contiguous()
    larger = local.new_zeros(shape)
    larger[tuple(slice(size) for size in local.shape)] = local
    return larger


def crop(part: Tensor, shape: Sequence[int]) -> Tensor:
    """A padded part without its padding: the first `shape[i]` elements of each dim i."""
    if tuple(part.shape) != tuple(shape):
        part = part[tuple([slice(size) for size in shape])]
    return part.contiguous()


@dataclass(frozen=True, slots=True)
class Stacking:
    """How equal parts of a tensor are stacked along mesh axes; made by `stacking_of`."""

    part: tuple[int, ...]  # shape of each part
    sizes: tuple[int, ...]  # sizes of the mesh axes, outermost in the stack first
    padded_shape: tuple[int, ...]  # shape of the tensor, padded so that all parts have the shape `part`
    axes_of_dim: tuple[tuple[int, ...], ...]  # by dim, the axes that cut the dim, as indices of `sizes`, major first
    split_shape: tuple[int, ...]  # each dim of `padded_shape` split into its axes' sizes and its size in a part
    dim_order: tuple[int, ...]  # permutes the dims of [*sizes, *part] to `split_shape`

    @property
    def parts_are_rows(self) -> bool:
        """Whether only the first dim is cut: each part is then a contiguous run of rows, in the stack's order."""
        return not any(self.axes_of_dim[1:])

    def as_stacked(self, tensor: Tensor) -> Tensor:
        """A view of a contiguous tensor of shape `padded_shape` as its stacked parts: [*sizes, *part]."""
        inverse = [self.dim_order.index(dim) for dim in range(len(self.dim_order))]
        return tensor.reshape(self.split_shape).permute(inverse)

    def unstack(self, stacked: Tensor) -> Tensor:
        """The tensor of shape `padded_shape` made of stacked parts; a copy where the parts' rows are interleaved.

        stacked: of any shape, with the elements of [*sizes, *part] in order.
        """
        return stacked.view(*self.sizes, *self.part).permute(self.dim_order).reshape(self.padded_shape)

    def view_pairs(self, rows: Tensor, tensor: Tensor, positions: Positions) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views, of `rows` and `tensor`, with the same elements without padding, for copies either way.

        rows: [parts, elements of a part]. tensor: contiguous, no larger than `padded_shape`.
        positions: the position in the stack of each row's part. A range: the rows are in the stack's order.
        """
        if tuple(tensor.shape) == self.padded_shape and isinstance(positions, range):
            yield rows.view(*self.sizes, *self.part), self.as_stacked(tensor)
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
        indices = []
        for axes in self.axes_of_dim:
            index = 0
            for axis in axes:
                index = index * self.sizes[axis] + coordinate[axis]
            indices.append(index)
        return indices


@lru_cache(maxsize=65536)
def stacking_of(
    part: tuple[int, ...], leading: tuple[str, ...], sizes: tuple[int, ...], step: AllGather | ReduceScatter
) -> Stacking:
    """How parts of shape `part` are stacked: the input of a ReduceScatter, or the output of an AllGather.

    leading: the mesh axes in stacking order, outermost first. sizes: of these axes.
    step: the collective, whose axes and dims tell which axes cut which dim.
    """
    axes_of_dim = tuple(tuple(leading.index(axis) for axis in _axes_over(step, dim)) for dim in range(len(part)))
    padded_shape = tuple(
        size * math.prod(sizes[axis] for axis in axes) for size, axes in zip(part, axes_of_dim, strict=True)
    )
    dim_order = [dim for inner, axes in enumerate(axes_of_dim) for dim in (*axes, len(sizes) + inner)]
    split_shape = [(*sizes, *part)[dim] for dim in dim_order]
    return Stacking(part, sizes, padded_shape, axes_of_dim, tuple(split_shape), tuple(dim_order))


def _axes_over(step: AllGather | ReduceScatter, dim: int) -> list[str]:
    return [axis for axis, over in zip(axes_of(step), dims_of(step), strict=True) if over == dim]
