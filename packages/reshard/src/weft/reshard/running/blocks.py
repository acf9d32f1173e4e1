"""Parts of a tensor as a collective stacks them, and as the tensor holds them: padded, put side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ..planning.steps import AllGather, ReduceScatter, axes_of, dims_of
from .worlds import Positions


def padded(local: Tensor, shape: Sequence[int]) -> Tensor:
    """`local`, contiguous, with zeros behind it up to `shape`."""
    if list(local.shape) == list(shape):
        return local.contiguous()
    larger = local.new_zeros(shape)
    larger[tuple(slice(size) for size in local.shape)] = local
    return larger


def cut_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a padded part, up to `shape`."""
    return part[tuple(slice(size) for size in shape)].contiguous()


def assembled(stacked: Tensor, leading: Sequence[str], step: AllGather) -> Tensor:
    """Parts stacked along `leading` axes, put side by side in the dims that the axes shard."""
    count = len(leading)
    order: list[int] = []
    shape: list[int] = []
    for dim, size in enumerate(stacked.shape[count:]):
        of_dim = [leading.index(axis) for axis in _axes_over(step, dim)]
        order += [*of_dim, count + dim]
        for position in of_dim:
            size *= stacked.shape[position]
        shape.append(size)
    return stacked.permute(order).reshape(shape)


@dataclass(frozen=True, slots=True)
class Stacking:
    """Parts of one shape, stacked along axes, of a tensor that has them side by side.

    part: the shape of each. sizes: of the axes, as they are stacked. whole: the shape of the tensor, padded to whole parts.
    along: of each dim of the tensor, the positions in `sizes` of the axes that cut it, major first.
    """

    part: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    along: tuple[tuple[int, ...], ...]

    @property
    def is_of_rows(self) -> bool:
        """Whether each part is in one place of the tensor: only the first dim is cut."""
        return not any(self.along[1:])

    def of_whole(self, whole: Tensor) -> Tensor:
        """A view of a tensor of shape `whole`: [*sizes, *part]."""
        view: list[int] = []
        where: dict[int, int] = {}
        inner: list[int] = []
        for size, axes in zip(self.part, self.along, strict=True):
            for axis in axes:
                where[axis] = len(view)
                view.append(self.sizes[axis])
            inner.append(len(view))
            view.append(size)
        return whole.reshape(view).permute(*(where[axis] for axis in range(len(self.sizes))), *inner)

    def pairs(self, rows: Tensor, tensor: Tensor, positions: Positions) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of `rows`, each with that of `tensor` which holds the same elements: all of it, without padding.

        rows: [parts, elements of one]. tensor: contiguous, no larger than `whole`. positions: of the part in each row.
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
        """Which of the parts side by side it is, along each dim."""
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
    """How parts of that shape are stacked along `leading` axes of these sizes, before the step scatters or after it gathers."""
    along = tuple(tuple(leading.index(axis) for axis in _axes_over(step, dim)) for dim in range(len(part)))
    whole = tuple(size * math.prod(sizes[axis] for axis in axes) for size, axes in zip(part, along, strict=True))
    return Stacking(part, sizes, whole, along)


def _axes_over(step: AllGather | ReduceScatter, dim: int) -> list[str]:
    return [axis for axis, over in zip(axes_of(step), dims_of(step), strict=True) if over == dim]
