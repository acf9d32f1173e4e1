"""Operations that pick elements, or put tensors side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..arguments import as_shape
from ..layout import Layout
from ..placement import Partial, Placement, Replicate
from .terms import Operation, Placements, checked_dims, infer, least_ndim, letters, one_reduction


def embedding(tokens: Layout, weight: Layout, tokens_ndim: int) -> Layout:
    """Layout of the rows of `weight` [V, H] that `tokens`, of `tokens_ndim` dims, name.

    An axis that shards V leaves the output Partial(sum): each rank gives zeros for the tokens that are not its own. So
    the tokens must be whole there. Raises LayoutError for other layouts, and for tokens that are Partial.
    """
    return _embedding(tokens, weight, *as_shape((tokens_ndim,)))


@lru_cache(maxsize=65536)
def _embedding(tokens: Layout, weight: Layout, tokens_ndim: int) -> Layout:
    term = letters(tokens_ndim + 2)
    lead, vocabulary, width = term[:tokens_ndim], *term[tokens_ndim:]
    return infer(
        Operation(
            "embedding", (lead, vocabulary + width), lead + width, _of(1), Partial("sum"),
            operands=("the tokens", "the table"),
        ),
        (tokens, weight),
    )  # fmt: skip


def gather(input: Layout, index: Layout, dim: int, ndim: int) -> Layout:
    """Layout of `torch.take_along_dim(input, index, dim)`, of tensors of `ndim` dims that differ in size along `dim` alone.

    An axis that shards `dim` of the input leaves the output Partial(sum): each rank gives zeros for the indices outside
    its part. One that shards another dim shards it in both.
    Raises LayoutError for other layouts, and for indices that are Partial; ValueError for a dim that does not exist.
    """
    (dim,) = checked_dims("gather", dim, ndim)
    return _gather(input, index, dim, ndim)


@lru_cache(maxsize=65536)
def _gather(input: Layout, index: Layout, dim: int, ndim: int) -> Layout:
    term, picked = letters(ndim + 1)[:-1], letters(ndim + 1)[-1]
    return infer(
        Operation(
            "gather", (term[:dim] + picked + term[dim + 1 :], term), term, _of(0), Partial("sum"),
            operands=("the input", "the index"),
        ),
        (input, index),
    )  # fmt: skip


def concat(dim: int, *layouts: Layout) -> Layout:
    """Layout of tensors of one layout put side by side along `dim`, which must be whole.

    Partial passes where all are Partial by one reduction; a replicated one is its own avg, min and max.
    Raises LayoutError for other layouts; ValueError for a dim below 0.
    """
    return _concat(*checked_dims("concat", dim), layouts)


@lru_cache(maxsize=65536)
def _concat(dim: int, layouts: tuple[Layout, ...]) -> Layout:
    term = letters(least_ndim(layouts, dim))
    why = f"the parts of dim {dim} together are no part of the whole dim"
    return infer(
        Operation("concat", (term,) * len(layouts), term, one_reduction, whole=term[dim], why_whole=why), layouts
    )


def split(layout: Layout, dim: int) -> Layout:
    """Layout of each piece of a tensor cut along `dim`, which must be whole; so of a slice along it.

    Raises LayoutError where the dim is sharded; ValueError for a dim below 0.
    """
    return _split(layout, *checked_dims("split", dim))


@lru_cache(maxsize=65536)
def _split(layout: Layout, dim: int) -> Layout:
    term = letters(least_ndim((layout,), dim))
    why = f"a piece of dim {dim} lies on some of its ranks alone"
    return infer(
        Operation("split", (term,), term, one_reduction, whole=term[dim], why_whole=why, operands=("it",)), (layout,)
    )


def _of(source: int) -> Callable[[Placements], Placement | None]:
    """Of the tensor at `source`, whose elements are picked, any reduction passes; of the other, which says which, none."""

    def partial(placements: Placements) -> Placement | None:
        return placements[source] if isinstance(placements[1 - source], Replicate) else None

    return partial
