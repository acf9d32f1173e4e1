"""Layout rules of operations which only move elements: transpose, reshape, embedding, gather, concat and split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product

from ..arguments import as_shape
from ..layout import Layout, LayoutError, largest_part
from ..placement import Partial, Placement, Replicate, Shard
from .terms import OperandPlacements, Operation, check_dims, infer, least_ndim, letters, nearest, pass_same_reduction

# A rank's elements: for each dim, the size of the dim and the start and stop of the indices held.
Slab = tuple[tuple[int, int, int], ...]


def transpose(layout: Layout, dims: Sequence[int]) -> Layout:
    """Layout of `tensor.permute(dims)`: dim i of the output is dim dims[i] of the input.

    Raises LayoutError where the layout shards a dim missing in `dims`, as dim 2 with dims (1, 0). Raises ValueError for
    dims that are not a permutation.
    """
    return _transpose(layout, check_dims("transpose", dims, len(tuple(dims))))


@lru_cache(maxsize=65536)
def _transpose(layout: Layout, dims: tuple[int, ...]) -> Layout:
    term = letters(len(dims))
    output = "".join(term[dim] for dim in dims)
    return infer(
        Operation(f"transpose to dims {dims}", (term,), output, pass_same_reduction, operands=("the operand",)),
        (layout,),
    )


def reshape(layout: Layout, shape: Sequence[int], new_shape: Sequence[int]) -> Layout:
    """Layout of `tensor.reshape(new_shape)` (or `view`, `flatten`), for a tensor of `shape` in `layout`.

    Each rank reshapes its part, and holds the same elements before and after. Partial placements stay,
    whatever their op.
    Raises LayoutError where no layout of `new_shape` gives the ranks the same elements: a part would begin or end in
    the middle of a row, or be in several pieces. Raises ValueError for shapes of different size.
    """
    return _reshape(layout, as_shape(shape), as_shape(new_shape))


@lru_cache(maxsize=65536)
def _reshape(layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Layout:
    layout = layout.resolved(shape)
    if math.prod(shape) != math.prod(new_shape):
        raise ValueError(
            f"reshape from {shape} to {new_shape}: {math.prod(shape)} elements are not {math.prod(new_shape)}"
        )
    reshaped = _find_layout_after(layout, shape, new_shape)
    if reshaped is None:
        near = nearest(layout, shape, lambda candidate: _find_layout_after(candidate, shape, new_shape) is not None)
        raise LayoutError(
            f"reshape from {shape} to {new_shape}: no layout of the new shape gives each rank of ({layout}) "
            f"the elements that it holds; reshard the operand to ({near})",
            (near,),
        )
    return reshaped


def _find_layout_after(layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Layout | None:
    """The layout of the new shape in which every rank holds the same elements as before; None for none.

    Places one sharding axis after the other: the axes of dim 0 first, within a dim the major axis first. Each round
    replicates the axes not placed yet, in the old and in the new layout, and keeps the placements with which both
    layouts give all ranks the same elements. No solution is lost: two layouts which agree on every rank also agree
    after some axes are replicated in both, because each rank then holds the union of the parts along these axes.
    """
    sharding = [axis for axes in layout.shard_order.values() for axis in axes]

    def replicate_remaining(chosen: dict[str, Placement]) -> dict[str, Placement]:
        """`chosen` for some axes; every other axis that shards is replicated."""
        remaining_axes = (axis for axis in layout.mesh.axis_names if axis not in chosen)
        return chosen | {axis: Replicate() if axis in sharding else layout[axis] for axis in remaining_axes}

    candidates: list[dict[str, Placement]] = [{}]
    options: list[Placement] = [*map(Shard, range(len(new_shape))), Replicate()]
    for count in range(1, len(sharding) + 1):
        before = Layout.in_order(layout.mesh, replicate_remaining({axis: layout[axis] for axis in sharding[:count]}))
        wider = [{**chosen, sharding[count - 1]: placement} for chosen in candidates for placement in options]
        candidates = []
        for chosen in wider:
            after = Layout.in_order(layout.mesh, replicate_remaining(chosen))
            ranks = _deciding_ranks(sharding[:count], before, shape, after, new_shape)
            if all(_held(before, shape, rank) == _held(after, new_shape, rank) for rank in ranks):
                candidates.append(chosen)
    return Layout.in_order(layout.mesh, replicate_remaining(candidates[0])) if candidates else None


def _deciding_ranks(
    axes: Sequence[str], layout: Layout, shape: tuple[int, ...], after: Layout, new_shape: tuple[int, ...]
) -> Iterator[int]:
    """The ranks which decide whether two layouts give every rank the same elements.

    Along an axis, the part at index i begins at i times the size of the first part, or at the end of the dim if that
    comes first. Two layouts therefore agree on all ranks if both agree at every axis's first two indices, at the last
    index, and at the indices where the dim ends under either layout.
    """
    mesh = layout.mesh
    indices = {
        axis: _deciding_indices(layout, shape, axis) | _deciding_indices(after, new_shape, axis) for axis in axes
    }
    for index in product(*(sorted(indices.get(axis, {0})) for axis in mesh.axis_names)):
        yield mesh.rank_at(**dict(zip(mesh.axis_names, index, strict=True)))


def _deciding_indices(layout: Layout, shape: tuple[int, ...], axis: str) -> set[int]:
    """Indices of an axis to compare: the first two, the last, and the indices around the first short or empty part."""
    size = layout.mesh.axis_size(axis)
    indices = {0, 1, size - 1}
    placement = layout[axis]
    if isinstance(placement, Shard):
        extents = {shape[placement.dim]}  # sizes of the parts that the axis cuts, made by the axes before
        for outer in layout.shard_order[placement.dim]:
            parts = layout.mesh.axis_size(outer)
            steps = {extent: largest_part(extent, parts) for extent in extents if extent}
            if outer == axis:
                indices |= {extent // step + near for extent, step in steps.items() for near in (-1, 0, 1)}
                break
            extents = {part for extent, step in steps.items() for part in (step, extent % step)}
    return {index for index in indices if 0 <= index < size}


def _held(layout: Layout, shape: tuple[int, ...], rank: int) -> Slab | None:
    """The elements held by a rank, equal for two shapes if the elements are the same; None for no elements.

    A dim is merged into the previous dim where the rank holds the whole dim, or a single index of the previous dim.
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


def embedding(tokens: Layout, weight: Layout, tokens_ndim: int) -> Layout:
    """Layout of the rows of `weight` [V, H] picked by `tokens`, which have `tokens_ndim` dims.

    An axis sharding V leaves the output Partial(sum): each rank gives zeros for tokens whose rows other ranks hold. The
    tokens must replicate on this axis. Raises LayoutError for further layouts, and for Partial tokens.
    """
    return _embedding(tokens, weight, *as_shape((tokens_ndim,)))


@lru_cache(maxsize=65536)
def _embedding(tokens: Layout, weight: Layout, tokens_ndim: int) -> Layout:
    term = letters(tokens_ndim + 2)
    lead, vocabulary, width = term[:tokens_ndim], *term[tokens_ndim:]
    return infer(
        Operation(
            "embedding", (lead, vocabulary + width), lead + width, _partial_of(1), Partial("sum"),
            operands=("the tokens", "the table"),
        ),
        (tokens, weight),
    )  # fmt: skip


def gather(input: Layout, index: Layout, dim: int, ndim: int) -> Layout:
    """Layout of `torch.take_along_dim(input, index, dim)`.

    Both tensors have `ndim` dims, and differ in size along `dim` only. An axis sharding `dim` of the input leaves the
    output Partial(sum): each rank gives zeros for indices whose elements other ranks hold. An axis sharding another dim
    must shard this dim in both tensors.
    Raises LayoutError for further layouts, and for Partial indices. Raises ValueError for a dim outside `ndim`.
    """
    (dim,) = check_dims("gather", dim, ndim)
    return _gather(input, index, dim, ndim)


@lru_cache(maxsize=65536)
def _gather(input: Layout, index: Layout, dim: int, ndim: int) -> Layout:
    term, picked = letters(ndim + 1)[:-1], letters(ndim + 1)[-1]
    return infer(
        Operation(
            "gather", (term[:dim] + picked + term[dim + 1 :], term), term, _partial_of(0), Partial("sum"),
            operands=("the input", "the index"),
        ),
        (input, index),
    )  # fmt: skip


def concat(dim: int, *layouts: Layout) -> Layout:
    """Layout of tensors concatenated along `dim`: all have the same layout, which does not shard `dim`.

    Partial passes where all tensors are Partial by the same op. A replicated tensor counts as Partial by avg, min or
    max.
    Raises LayoutError for other layouts. Raises ValueError for a negative dim.
    """
    return _concat(*check_dims("concat", dim), layouts)


@lru_cache(maxsize=65536)
def _concat(dim: int, layouts: tuple[Layout, ...]) -> Layout:
    term = letters(least_ndim(layouts, dim))
    why = f"shards of dim {dim} side by side are not a shard of the output"
    return infer(
        Operation("concat", (term,) * len(layouts), term, pass_same_reduction, whole=term[dim], why_whole=why), layouts
    )


def split(layout: Layout, dim: int) -> Layout:
    """Layout of each piece of a tensor split, or sliced, along `dim`, which must not be sharded.

    Raises LayoutError where the dim is sharded. Raises ValueError for a negative dim.
    """
    return _split(layout, *check_dims("split", dim))


@lru_cache(maxsize=65536)
def _split(layout: Layout, dim: int) -> Layout:
    term = letters(least_ndim((layout,), dim))
    why = f"only some ranks would hold elements of a piece of dim {dim}"
    return infer(
        Operation(
            "split", (term,), term, pass_same_reduction, whole=term[dim], why_whole=why, operands=("the operand",)
        ),
        (layout,),
    )


def _partial_of(source: int) -> Callable[[OperandPlacements], Placement | None]:
    """The rule for Partial operands of a pick: where the indices replicate, the placement of the elements passes.

    source: the position of the operand with the elements; the remaining operand has the indices.
    """

    def partial(placements: OperandPlacements) -> Placement | None:
        return placements[source] if isinstance(placements[1 - source], Replicate) else None

    return partial
