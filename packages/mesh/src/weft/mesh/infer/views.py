"""Operations that give the same elements another shape; they cost nothing, and any reduction passes through them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from ..errors import LayoutError
from ..layout import Layout
from ..placement import Placement, Replicate, Shard
from .terms import Operation, infer, letters, one_reduction

Slab = tuple[tuple[int, int, int], ...]  # for each dim its size, and the start and stop of what is held


@lru_cache(maxsize=65536)
def transpose(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """Layout of `tensor.permute(dims)`: dim i of the output is dim dims[i] of the input.

    Raises LayoutError for a layout of more dims; ValueError for dims that are no permutation.
    """
    if sorted(dims) != list(range(len(dims))):
        raise ValueError(f"dims {dims} are no permutation; name each of 0 to {len(dims) - 1} once")
    term = letters(len(dims))
    output = "".join(term[dim] for dim in dims)
    return infer(Operation(f"transpose to dims {dims}", (term,), output, one_reduction, operands=("it",)), (layout,))


@lru_cache(maxsize=65536)
def reshape(layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Layout:
    """Layout of a tensor of `shape` given `new_shape`, as `view` and `flatten` do, by reshaping each local part.

    It is the layout in which every rank holds the elements that it held; Partial passes by any reduction.
    Raises LayoutError where there is none: a part would begin or end in the middle of a row, or lie in pieces.
    Raises ValueError for two shapes of different size.
    """
    layout.check_shape(shape)
    if math.prod(shape) != math.prod(new_shape):
        raise ValueError(
            f"reshape from {shape} to {new_shape}: {math.prod(shape)} elements are not {math.prod(new_shape)}"
        )
    found = _reshaped(layout, shape, new_shape)
    if found is None:
        nearest = next(near for near in _nearest(layout, len(shape)) if _reshaped(near, shape, new_shape))
        raise LayoutError(
            f"reshape from {shape} to {new_shape}: no layout of the new shape gives each rank of ({layout}) the elements "
            f"that it holds; reshard it to ({nearest})",
            (nearest,),
        )
    return found


def _reshaped(layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Layout | None:
    sharding = _sharding(layout)
    options: list[Placement] = [*map(Shard, range(len(new_shape))), Replicate()]
    for placements in product(options, repeat=len(sharding)):
        others = {axis: layout[axis] for axis in layout.mesh.axis_names if axis not in sharding}
        after = Layout.in_order(layout.mesh, dict(zip(sharding, placements, strict=True)) | others)
        if all(
            _held(layout, shape, rank) == _held(after, new_shape, rank)
            for rank in _ranks_to_ask(layout, shape, after, new_shape)
        ):
            return after
    return None


def _sharding(layout: Layout) -> list[str]:
    """The axes that shard a dim, in the order of the elements: those of the first dim first, the major one before."""
    return [axis for axes in layout.shard_order.values() for axis in axes]


def _ranks_to_ask(layout: Layout, shape: Sequence[int], after: Layout, new_shape: Sequence[int]) -> Iterator[int]:
    """Ranks that tell whether two layouts give every rank the same elements.

    Where all parts are equal, a step along an axis moves them by so many elements, wherever it is taken: one is enough.
    """
    mesh = layout.mesh
    even = not any(
        size % each.parts(dim)
        for each, sizes in ((layout, shape), (after, new_shape))
        for dim, size in enumerate(sizes)
    )
    sharding = _sharding(layout)
    ends = {axis: min(2, mesh.axis_size(axis)) if even else mesh.axis_size(axis) for axis in sharding}
    for index in product(*(range(ends.get(axis, 1)) for axis in mesh.axis_names)):
        yield mesh.rank_at(**dict(zip(mesh.axis_names, index, strict=True)))


def _held(layout: Layout, shape: tuple[int, ...], rank: int) -> Slab | None:
    """The elements that a rank holds, written in one way whatever the shape is; None for none.

    A dim is merged into the one before it where all of it is held, or one index of that other.
    """
    slab: list[tuple[int, int, int]] = []
    for size, part in zip(shape, layout.local_slices(shape, rank), strict=True):
        if part.start >= part.stop:
            return None
        if size == 1:
            continue
        before, start, stop = slab[-1] if slab else (1, 0, 1)
        if part == slice(0, size):
            start, stop = start * size, stop * size
        elif stop - start == 1:
            start, stop = start * size + part.start, start * size + part.stop
        else:
            slab.append((size, part.start, part.stop))
            continue
        slab[-1:] = [(before * size, start, stop)]
    return tuple(slab)


def _nearest(layout: Layout, ndim: int) -> Iterator[Layout]:
    """Layouts whose axes shard other dims, or fewer; first those for which the fewest bytes move."""
    axes = _sharding(layout)
    options: list[Placement] = [*map(Shard, range(ndim)), Replicate()]

    def gathered_and_changed(placements: Sequence[Placement]) -> tuple[int, int]:
        changed = sum(layout[axis] != placement for axis, placement in zip(axes, placements, strict=True))
        return placements.count(Replicate()), changed

    for placements in sorted(product(options, repeat=len(axes)), key=gathered_and_changed):
        yield layout.replace(**dict(zip(axes, placements, strict=True)))
