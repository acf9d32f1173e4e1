"""Operations that leave elements, or rows, where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..layout import Layout
from ..placement import Placement
from .terms import Operation, Placements, infer, letters, never, one_reduction


@lru_cache(maxsize=65536)
def elementwise(name: str, linear: bool, *layouts: Layout, shapes: tuple[tuple[int, ...], ...] | None = None) -> Layout:
    """Layout of an elementwise operation: all operands lie alike.

    linear: in all operands together, as an addition is, so that Partial(sum) passes where all are, and Partial(avg),
        of which a replicated operand is one too. For a product, in each operand alone, see `einsum`.
    shapes: of the operands, where they are broadcast as torch does; otherwise they have one shape.
    Raises LayoutError for operands that lie otherwise, and for Partial ones that do not pass.
    """
    whole = ""
    if shapes is None:
        dims = max((dim + 1 for layout in layouts for dim in layout.shard_order), default=0)
        terms, output = (letters(dims),) * len(layouts), letters(dims)
    else:
        dims = max(map(len, shapes))
        output, new = letters(dims), iter(letters(dims * (1 + len(shapes)))[dims:])
        sizes = [max((s[dim - dims] for s in shapes if dims - dim <= len(s)), default=1) for dim in range(dims)]
        terms = tuple(
            "".join(
                next(new) if size == 1 != sizes[dim] else output[dim]
                for dim, size in enumerate(shape, dims - len(shape))
            )
            for shape in shapes
        )
        whole = "".join(sorted(set("".join(terms)) - set(output)))
    return infer(
        Operation(
            name, terms, output, _linear if linear else never,
            whole=whole, why_whole="a dim that is broadcast has one element, which all ranks need",
        ),
        layouts,
    )  # fmt: skip


def _linear(placements: Placements) -> Placement | None:
    partial = one_reduction(placements)
    return partial if partial is not None and partial.op in ("sum", "avg") else None


@lru_cache(maxsize=65536)
def whole(name: str, what: str, layout: Layout, dims: int | Sequence[int]) -> Layout:
    """Layout of an operation that needs `dims` of its operand whole and keeps its shape, as softmax, norms and sorts do.

    what: the operand, in the message. dims: one, or a tuple.
    Raises LayoutError where one of them is sharded, or the layout is Partial.
    """
    chosen = (dims,) if isinstance(dims, int) else tuple(dims)
    term = letters(1 + max((*chosen, *layout.shard_order), default=0))
    return infer(
        Operation(
            name, (term,), term, never, operands=(what,),
            whole="".join(term[dim] for dim in chosen),
            why_whole=f"{name} needs dim {', '.join(map(str, chosen))} of {what} whole",
        ),
        (layout,),
    )  # fmt: skip
