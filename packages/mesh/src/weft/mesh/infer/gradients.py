"""The layout of an operand's gradient, for operations whose local parts do not depend on one another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..layout import Layout, LayoutError
from ..placement import Partial, Placement, Replicate, Shard
from .terms import one_mesh


def gradient(output: Layout, grad: Layout, operand: Layout, operands: Sequence[Layout]) -> Layout:
    """Layout of an operand's gradient, computed on local parts from a gradient that lies as `grad`.

    For operations that are linear in what is Partial(avg), as `einsum` and linear `elementwise` ones are. The gradient is
    that of the whole value, so of a Partial one it is replicated. On each axis, a gradient that is Partial(sum) stays so; a
    sharded operand's lies as the operand; a replicated operand's is Partial where another operand is not replicated, as
    each rank sees what its own part of that one brings.
    Raises LayoutError for a gradient that lies otherwise than the output, or is Partial where the operands are not whole;
    for one that would be Partial by two reductions; for an output that is Partial by min, max or product, or an average
    that the operation itself took; ValueError for an operand that is none of `operands`.
    """
    if operand not in operands:
        raise ValueError(f"operand ({operand}) is none of the operands {', '.join(f'({each})' for each in operands)}")
    return _gradient(output, grad, operand, tuple(operands))


@lru_cache(maxsize=65536)
def _gradient(output: Layout, grad: Layout, operand: Layout, operands: tuple[Layout, ...]) -> Layout:
    mesh = one_mesh((output, grad, *operands))
    needed: dict[str, Placement] = {}
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        got, out, own = grad[axis], output[axis], operand[axis]
        if isinstance(out, Partial) and out.op != "sum" and not (out.op == "avg" and _any(operands, axis, out)):
            raise LayoutError(
                f"the output is {out} on axis {axis!r}, by an operation that gives every rank's part another share of the "
                f"gradient; reshard the operands to Replicate() on {axis!r} before it"
            )
        replicated = all(isinstance(other[axis], Replicate) for other in operands)
        passes = replicated and got == Partial("sum")
        needed[axis] = got if passes else Replicate() if isinstance(out, Partial) else out
        if passes:
            placements[axis] = got
        elif isinstance(own, Replicate) and not replicated:
            placements[axis] = out if out == Partial("avg") else Partial("sum")
        else:
            placements[axis] = own if isinstance(own, Shard) else Replicate()
    wanted = output.replace(**needed)
    if wanted != grad:
        raise LayoutError(
            f"the output is ({output}), but its gradient arrived as ({grad}); reshard the output before it is used, so "
            f"that its gradient comes as ({wanted})",
            (wanted,),
        )
    averaged = [axis for axis, placement in placements.items() if placement == Partial("avg")]
    if averaged and Partial("sum") in placements.values():
        raise LayoutError(
            f"the gradient of an operand ({operand}) would be Partial by sum and, on axis {averaged[0]!r}, by avg; reshard "
            f"the other operand, which is P(avg), to Replicate() on {averaged[0]!r} before it is used"
        )
    return operand.replace(**placements)


def _any(operands: tuple[Layout, ...], axis: str, placement: Placement) -> bool:
    return any(each[axis] == placement for each in operands)
