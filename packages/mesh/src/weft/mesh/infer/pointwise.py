"""Layout rules of operations on elements, or rows, in place: elementwise operations, softmax, norms, sorts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..arguments import as_shape
from ..layout import Layout
from ..placement import Placement
from .terms import Operation, Placements, check_dims, infer, least_ndim, letters, never, pass_same_reduction


def elementwise(
    name: str,
    linear: bool,
    *layouts: Layout,
    shapes: Sequence[Sequence[int]] | None = None,
    operands: tuple[str, ...] = (),
) -> Layout:
    """Layout of an elementwise operation, whose operands must all have the same layout.

    name: the operation, in messages.
    linear: whether the operation is linear in all operands together, as addition is. Then Partial(sum) passes where
        all operands are Partial(sum), and Partial(avg) where each operand is Partial(avg) or replicated. Products are
        linear in each operand alone; use `einsum` for them.
    shapes: the operands' shapes, where they are broadcast as in torch; by default all have the same shape.
    operands: the operands' names in messages; by default operand 0, operand 1, …
    Raises LayoutError for operands of different layouts, and for Partial operands that do not pass. Raises ValueError
    for shapes that cannot be broadcast together, and for more or fewer shapes or names than operands.
    """
    if operands and len(operands) != len(layouts):
        raise ValueError(f"{name}: {len(operands)} names for {len(layouts)} layouts; give one for each operand")
    return _elementwise(name, linear, layouts, None if shapes is None else tuple(map(as_shape, shapes)), operands)


@lru_cache(maxsize=65536)
def _elementwise(
    name: str,
    linear: bool,
    layouts: tuple[Layout, ...],
    shapes: tuple[tuple[int, ...], ...] | None,
    operands: tuple[str, ...],
) -> Layout:
    whole = ""
    if shapes is None:
        output = letters(least_ndim(layouts))
        terms: tuple[str, ...] = (output,) * len(layouts)
    else:
        if len(shapes) != len(layouts):
            raise ValueError(f"{name}: {len(shapes)} shapes for {len(layouts)} layouts; give one for each operand")
        terms, output = _broadcast(name, shapes)
        whole = "".join(sorted(set("".join(terms)) - set(output)))
    return infer(
        Operation(
            name, terms, output, _linear if linear else never, operands=operands,
            whole=whole, why_whole="a dim that is broadcast has one element, which all ranks need",
        ),
        layouts,
    )  # fmt: skip


def _broadcast(name: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, ...], str]:
    """The terms of the operands and the output's term; a broadcast dim gets an index of its own."""
    dims = max(map(len, shapes), default=0)
    output = letters(dims)
    padded = [(1,) * (dims - len(shape)) + shape for shape in shapes]
    sizes = []
    for column in zip(*padded, strict=True):
        wide = set(column) - {1}
        if len(wide) > 1:
            raise ValueError(f"{name}: shapes {', '.join(map(str, shapes))} cannot be broadcast together")
        sizes.append(wide.pop() if wide else 1)
    new = iter(letters(dims * (1 + len(shapes)))[dims:])
    return tuple(
        "".join(
            next(new) if size == 1 != full_size else index
            for size, full_size, index in list(zip(shape, sizes, output, strict=True))[dims - len(unpadded) :]
        )
        for shape, unpadded in zip(padded, shapes, strict=True)
    ), output


def _linear(placements: Placements) -> Placement | None:
    """The Partial placement that passes through a linear operation; None for any other mix."""
    partial = pass_same_reduction(placements)
    return partial if partial is not None and partial.op in ("sum", "avg") else None


def whole(name: str, what: str, layout: Layout, dims: int | Sequence[int]) -> Layout:
    """Layout of an operation that keeps its operand's shape and needs `dims` unsharded: softmax, norms, sorts.

    what: the operand's name in messages. dims: a dim or several, counted from the front.
    Raises LayoutError where a dim of `dims` is sharded or the operand is Partial. Raises ValueError for a negative
    dim.
    """
    return _whole(name, what, layout, check_dims(name, dims))


@lru_cache(maxsize=65536)
def _whole(name: str, what: str, layout: Layout, dims: tuple[int, ...]) -> Layout:
    term = letters(least_ndim((layout,), *dims))
    return infer(
        Operation(
            name, (term,), term, never, operands=(what,),
            whole="".join(term[dim] for dim in dims),
            why_whole=f"{name} needs dim {', '.join(map(str, dims))} of {what} whole",
        ),
        (layout,),
    )  # fmt: skip
