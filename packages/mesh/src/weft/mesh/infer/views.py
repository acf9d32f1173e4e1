"""Operations that give the same elements another shape; they cost nothing, and any reduction passes through them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from ..arguments import as_shape
from ..extents import largest_part
from ..layout import Layout, LayoutError
from ..placement import Placement, Replicate, Shard
from .nearest import nearest
from .terms import Operation, checked_dims, infer, letters, one_reduction

Slab = tuple[tuple[int, int, int], ...]  # for each dim its size, and the start and stop of what is held


def transpose(layout: Layout, dims: Sequence[int]) -> Layout:
    """Layout of `tensor.permute(dims)`: dim i of the output is dim dims[i] of the input.

    Raises LayoutError for a layout of more dims; ValueError for dims that are no permutation.
    """
    return _transpose(layout, checked_dims("transpose", dims, len(tuple(dims))))


@lru_cache(maxsize=65536)
def _transpose(layout: Layout, dims: tuple[int, ...]) -> Layout:
    term = letters(len(dims))
    output = "".join(term[dim] for dim in dims)
    return infer(Operation(f"transpose to dims {dims}", (term,), output, one_reduction, operands=("it",)), (layout,))


def reshape(layout: Layout, shape: Sequence[int], new_shape: Sequence[int]) -> Layout:
    """Layout of a tensor of `shape` given `new_shape`, as `view` and `flatten` do, by reshaping each local part.

    It is the layout in which every rank holds the elements that it held; Partial passes by any reduction.
    Raises LayoutError where there is none: a part would begin or end in the middle of a row, or lie in pieces.
    Raises ValueError for two shapes of different size.
    """
    return _reshape(layout, as_shape(shape), as_shape(new_shape))


@lru_cache(maxsize=65536)
def _reshape(layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Layout:
    layout = layout.resolved(shape)
    if math.prod(shape) != math.prod(new_shape):
        raise ValueError(
            f"reshape from {shape} to {new_shape}: {math.prod(shape)} elements are not {math.prod(new_shape)}"
        )
    found = _reshaped(layout, shape, new_shape)
    if found is None:
        near = nearest(layout, shape, lambda given: _reshaped(given, shape, new_shape) is not None)
        raise LayoutError(
            f"reshape from {shape} to {new_shape}: no layout of the new shape gives each rank of ({layout}) the elements "
            f"that it holds; reshard it to ({near})",
            (near,),
        )
    return found


def _reshaped(layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Layout | None:
    """The layout of the new shape in which every rank holds what it held.

    Found axis by axis, in the order of the elements: where it is right for some axes it is right for the first of them
    alone, the others replicated, for then each rank holds the union of what these would have.
    """
    sharding = [axis for axes in layout.shard_order.values() for axis in axes]

    def whole_but(chosen: dict[str, Placement]) -> dict[str, Placement]:
        """The layout with `chosen` for some axes, and those that shard otherwise replicated."""
        others = (axis for axis in layout.mesh.axis_names if axis not in chosen)
        return chosen | {axis: Replicate() if axis in sharding else layout[axis] for axis in others}

    found: list[dict[str, Placement]] = [{}]
    options: list[Placement] = [*map(Shard, range(len(new_shape))), Replicate()]
    for count in range(1, len(sharding) + 1):
        before = Layout.in_order(layout.mesh, whole_but({axis: layout[axis] for axis in sharding[:count]}))
        wider = [{**chosen, sharding[count - 1]: placement} for chosen in found for placement in options]
        found = []
        for chosen in wider:
            after = Layout.in_order(layout.mesh, whole_but(chosen))
            ranks = _ranks_to_ask(sharding[:count], before, shape, after, new_shape)
            if all(_held(before, shape, rank) == _held(after, new_shape, rank) for rank in ranks):
                found.append(chosen)
    return Layout.in_order(layout.mesh, whole_but(found[0])) if found else None


def _ranks_to_ask(
    axes: Sequence[str], layout: Layout, shape: tuple[int, ...], after: Layout, new_shape: tuple[int, ...]
) -> Iterator[int]:
    """Ranks that tell whether two layouts give every rank the same elements.

    Where a part begins is a multiple of its index, until the dim ends. So two layouts that agree at the first two indices
    of an axis, where either comes to the end of a dim, and at the last one, agree everywhere.
    """
    mesh = layout.mesh
    asked = {axis: _ends(layout, shape, axis) | _ends(after, new_shape, axis) for axis in axes}
    for index in product(*(sorted(asked.get(axis, {0})) for axis in mesh.axis_names)):
        yield mesh.rank_at(**dict(zip(mesh.axis_names, index, strict=True)))


def _ends(layout: Layout, shape: tuple[int, ...], axis: str) -> set[int]:
    """The first indices of an axis, the last, and those about which a part of what it cuts is short or empty."""
    size = layout.mesh.axis_size(axis)
    found = {0, 1, size - 1}
    placement = layout[axis]
    if isinstance(placement, Shard):
        extents = {shape[placement.dim]}  # of what the axis cuts: the parts of the axes before it
        for outer in layout.shard_order[placement.dim]:
            parts = layout.mesh.axis_size(outer)
            steps = {extent: largest_part(extent, parts) for extent in extents if extent}
            if outer == axis:
                found |= {extent // step + near for extent, step in steps.items() for near in (-1, 0, 1)}
                break
            extents = {part for extent, step in steps.items() for part in (step, extent % step)}
    return {index for index in found if 0 <= index < size}


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
