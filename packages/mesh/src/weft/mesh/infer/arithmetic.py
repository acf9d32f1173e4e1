"""Layout rules of arithmetic: elementwise operations, operations on whole rows (softmax), einsum, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..arguments import as_shape
from ..layout import Layout, LayoutError
from ..placement import Partial, Placement
from .terms import (
    OperandPlacements,
    Operation,
    check_dims,
    infer,
    judge,
    least_ndim,
    letters,
    nearest,
    never,
    pass_same_reduction,
)

# Reduction -> ops of the Partial operands accepted by the reduction.
PASSING_OPS = {"sum": ("sum", "avg"), "avg": ("sum", "avg"), "min": ("min",), "max": ("max",), "product": ("product",)}


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
    Raises LayoutError for operands of different layouts, and for Partial operands which do not pass. Raises ValueError
    for shapes which cannot be broadcast together, and for more or fewer shapes or names than operands.
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
    """The terms of the operands and the output's term; each broadcast dim gets a separate index."""
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


def _linear(placements: OperandPlacements) -> Placement | None:
    """The Partial placement which passes through a linear operation; None where none passes."""
    partial = pass_same_reduction(placements)
    return partial if partial is not None and partial.op in ("sum", "avg") else None


def whole(name: str, what: str, layout: Layout, dims: int | Sequence[int]) -> Layout:
    """Layout of an operation which keeps the operand's shape and needs `dims` unsharded: softmax, norms, sorts.

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


@lru_cache(maxsize=65536)
def einsum(equation: str, *layouts: Layout, name: str = "", operands: tuple[str, ...] = ()) -> Layout:
    """Layout of `torch.einsum(equation, ...)` computed by each rank on the rank's shards.

    An axis sharding a contracted index leaves the output Partial(sum). An axis sharding a kept index shards the output.
    Because einsum is linear in each operand, Partial(sum) and Partial(avg) pass where a single operand is
    Partial and the rest replicate. Where nothing is contracted, a sole operand passes with any reduction, and several
    operands pass where all are Partial(product).

    name, operands: names of the operation and its operands in messages; by default the equation and the terms.
    Raises LayoutError where the operands' shards do not fit together, and for an equation unlike the layouts.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = tuple(inputs.split(","))
    if not arrow or not all(index.isalpha() or index == "," for index in inputs + output):
        raise LayoutError(f"einsum {equation!r}: name each index by a letter, the output's too: 'mk,kn->mn'")
    if "," in output or len(set(output)) != len(output) or not set(output) <= set(inputs):
        raise LayoutError(f"einsum {equation!r}: the output {output!r} must have indices of the operands, each once")
    if len(terms) != len(layouts):
        raise LayoutError(f"einsum {equation!r} has {len(terms)} operands, got {len(layouts)} layouts")
    contracts = not set(inputs) - {","} <= set(output)

    def partial(placements: OperandPlacements) -> Placement | None:
        partials = [placement for placement in placements if isinstance(placement, Partial)]
        if len(partials) == 1 and (partials[0].op in ("sum", "avg") or (len(placements) == 1 and not contracts)):
            return partials[0]
        product = Partial("product")
        return product if pass_same_reduction(placements) == product and not contracts else None

    if operands and len(operands) != len(terms):
        raise ValueError(f"{name or equation}: {len(operands)} names for {len(terms)} operands; give one for each")
    called = operands or tuple(f"operand {position} ({term!r})" for position, term in enumerate(terms))
    operation = Operation(name or f"einsum {equation!r}", terms, output, partial, Partial("sum"), operands=called)
    return infer(operation, layouts)


def reduction(
    op: str, layout: Layout, shape: Sequence[int], dims: int | Sequence[int] | None = None, *, keepdim: bool = False
) -> Layout:
    """Layout of the sum, avg, min, max or product over `dims`; over all elements where `dims` is None.

    An axis sharding a reduced dim leaves the output Partial(op). A Partial operand passes where both reductions can be
    taken in either order: any mix of sum and avg; min, max and product each with the same reduction.

    shape: the global shape. An average needs parts of equal size; min and max need an element on every rank.
    Raises LayoutError where the result would be wrong. Raises ValueError for an unknown op or a dim outside the
    tensor.
    """
    if op not in PASSING_OPS:
        raise ValueError(f"no reduction {op!r}; use one of {', '.join(PASSING_OPS)}, or infer.whole for any other")
    sizes = as_shape(shape)
    every = range(len(sizes)) if dims is None else dims
    return _reduction(op, layout, sizes, check_dims(op, every, len(sizes)), keepdim)


@lru_cache(maxsize=65536)
def _reduction(op: str, layout: Layout, shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> Layout:
    layout = layout.resolved(shape)
    term = letters(len(shape))
    output = "".join("." if dim in dims else term[dim] for dim in range(len(shape)) if keepdim or dim not in dims)
    name = f"{op} over dims {dims} of {shape}"

    def partial(placements: OperandPlacements) -> Placement | None:
        (placement,) = placements
        return placement if isinstance(placement, Partial) and (placement.op in PASSING_OPS[op] or not dims) else None

    def judge_candidate(candidate: Layout) -> Layout | str:
        misfits, why = _misfits(op, candidate, shape, dims)
        whole = "".join(term[dim] for dim in misfits)
        operation = Operation(name, (term,), output, partial, Partial(op), whole, why, operands=("the operand",))
        return judge(operation, (candidate,))

    answer = judge_candidate(layout)
    if isinstance(answer, Layout):
        return answer
    near = nearest(layout, shape, lambda candidate: isinstance(judge_candidate(candidate), Layout))
    raise LayoutError(f"{name}: {answer}; reshard the operand to ({near})", (near,))


def _misfits(op: str, layout: Layout, shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[list[int], str]:
    """The reduced dims whose sharding makes the result wrong, and the reason."""
    if op == "avg":
        uneven = [dim for dim in dims if shape[dim] % layout.parts(dim)]
        return uneven, "averages of parts that differ in size differ in weight"
    if op in ("min", "max"):
        mesh = layout.mesh
        last = mesh.rank_at(**{axis: size - 1 for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)})
        held = layout.local_shape(shape, last)  # the last part of each dim is the smallest
        return [dim for dim in dims if not held[dim]], f"a rank without elements has no {op}"
    return [], ""
