"""Layout rules of embedding and gather, which pick elements by index, and of concat and split."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..arguments import as_shape
from ..layout import Layout
from ..placement import Partial, Placement, Replicate
from .terms import Operation, Placements, check_dims, infer, least_ndim, letters, pass_same_reduction


def embedding(tokens: Layout, weight: Layout, tokens_ndim: int) -> Layout:
    """Layout of the rows of `weight` [V, H] picked by `tokens`, which have `tokens_ndim` dims.

    An axis that shards V leaves the output Partial(sum): each rank gives zeros for the tokens outside its rows. The
    tokens must replicate on this axis. Raises LayoutError for other layouts, and for Partial tokens.
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

    Both tensors have `ndim` dims, and differ in size along `dim` only. An axis that shards `dim` of the input leaves
    the output Partial(sum): each rank gives zeros for the indices outside its part. An axis that shards another dim
    must shard this dim in both tensors.
    Raises LayoutError for other layouts, and for Partial indices. Raises ValueError for a dim outside `ndim`.
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


def _partial_of(source: int) -> Callable[[Placements], Placement | None]:
    """The rule for Partial operands of a pick: where the indices replicate, the placement of the elements passes.

    source: the position of the operand with the elements; the remaining operand has the indices.
    """

    def partial(placements: Placements) -> Placement | None:
        return placements[source] if isinstance(placements[1 - source], Replicate) else None

    return partial
