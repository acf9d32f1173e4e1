"""Layout rule of reductions: sum, avg, min, max and product over some dims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..arguments import as_shape
from ..layout import Layout, LayoutError
from ..placement import Partial, Placement
from .nearest import nearest
from .terms import Operation, Placements, check_dims, judge, letters

# Reduction -> ops of the Partial operands accepted by the reduction.
PASSING_OPS = {"sum": ("sum", "avg"), "avg": ("sum", "avg"), "min": ("min",), "max": ("max",), "product": ("product",)}


def reduction(
    op: str, layout: Layout, shape: Sequence[int], dims: int | Sequence[int] | None = None, *, keepdim: bool = False
) -> Layout:
    """Layout of the sum, avg, min, max or product over `dims`; over all elements where `dims` is None.

    An axis that shards a reduced dim leaves the output Partial(op). A Partial operand passes where both reductions can
    be taken in either order: sum and avg with themselves and each other, min, max and product only with themselves.

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

    def partial(placements: Placements) -> Placement | None:
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
