"""Operations that reduce dims to one element each, or to none."""

from __future__ import annotations

from functools import lru_cache

from ..layout import Layout
from ..placement import Partial, Placement
from .terms import Operation, Placements, infer, letters

PASSING = {"sum": ("sum", "avg"), "avg": ("sum", "avg"), "min": ("min",), "max": ("max",), "product": ("product",)}


@lru_cache(maxsize=65536)
def reduction(
    op: str, layout: Layout, shape: tuple[int, ...], dims: tuple[int, ...] | None = None, *, keepdim: bool = False
) -> Layout:
    """Layout of the sum, avg, min, max or product over `dims`, of all elements where none are given.

    An axis that shards a reduced dim leaves the output Partial(op). A tensor that is Partial passes where the two
    reductions can change places: sum and avg with both, the others with themselves.
    shape: of the whole tensor, for an average needs even parts, and the least and the greatest one element at least.
    Raises LayoutError where the result would be wrong; ValueError for an unknown op or a dim that does not exist.
    """
    if op not in PASSING:
        raise ValueError(f"no reduction {op!r}; use one of {', '.join(PASSING)}, or `whole` for another")
    reduced = tuple(range(len(shape))) if dims is None else dims
    for dim in reduced:
        if not 0 <= dim < len(shape):
            raise ValueError(f"dim {dim} is none of a tensor of shape {shape}; give 0 to {len(shape) - 1}")
    layout.check_shape(shape)
    term = letters(len(shape))
    output = "".join("." if dim in reduced else term[dim] for dim in range(len(shape)))
    last = layout.local_shape(
        shape, layout.mesh.rank_at(**{axis: layout.mesh.axis_size(axis) - 1 for axis in layout.mesh.axis_names})
    )
    misfits, why = [], ""
    if op == "avg":
        misfits = [dim for dim in reduced if shape[dim] % layout.parts(dim)]
        why = "averages of parts that differ in size differ in weight"
    elif op in ("min", "max"):
        misfits = [dim for dim in reduced if not last[dim]]
        why = f"a rank without elements has no {op}"

    def partial(placements: Placements) -> Placement | None:
        (placement,) = placements
        return placement if isinstance(placement, Partial) and (placement.op in PASSING[op] or not reduced) else None

    return infer(
        Operation(
            f"{op} over dims {reduced} of {shape}", (term,), output if keepdim else output.replace(".", ""), partial,
            contracted=Partial(op), whole="".join(term[dim] for dim in misfits), why_whole=why, operands=("it",),
            depends="".join(term[dim] for dim in reduced) if op in ("avg", "min", "max") else "",
        ),
        (layout,),
    )  # fmt: skip
