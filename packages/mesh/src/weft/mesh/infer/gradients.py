"""The layout of an operand's gradient, for operations computed by each rank independently on its own shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..layout import Layout, LayoutError
from ..placement import Partial, Placement, Replicate, Shard
from .terms import one_mesh


def gradient(output: Layout, grad: Layout, operand: Layout, operands: Sequence[Layout]) -> Layout:
    """Layout of an operand's gradient, computed by each rank from the rank's part of the upstream gradient.

    output: the layout of the operation's output. grad: the layout of the upstream gradient.
    operand: the layout of the operand whose gradient is asked for. operands: the layouts of all operands.

    The operation must be linear in every Partial(avg) operand, as `einsum` and linear `elementwise` operations are.
    The result is the gradient of the whole operand, so a Partial operand has a replicated gradient.

    On each axis, the first case which applies decides.
    Where all operands replicate and the upstream gradient is Partial(sum), the gradient is Partial(sum).
    Where the operand is sharded, the gradient is sharded alike.
    Where the operand replicates and another operand does not, the gradient is Partial, because each rank sees only the
    contribution of the rank's part of the other operand. The op is avg where the output is Partial(avg), else sum.
    Otherwise the gradient replicates.

    Raises ValueError for an operand missing from `operands`.
    Raises LayoutError for an upstream gradient with a layout unlike the output's (Replicate where the output is
    Partial), except Partial(sum) where all operands replicate.
    Raises LayoutError for a gradient that would be Partial by two reductions, for an output Partial by min, max or
    product, and for an output averaged by the operation itself.
    """
    if operand not in operands:
        raise ValueError(f"operand ({operand}) is not among the operands {', '.join(f'({each})' for each in operands)}")
    return _gradient(output, grad, operand, tuple(operands))


@lru_cache(maxsize=65536)
def _gradient(output: Layout, grad: Layout, operand: Layout, operands: tuple[Layout, ...]) -> Layout:
    mesh = one_mesh((output, grad, *operands))
    needed: dict[str, Placement] = {}
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        upstream, out, placement = grad[axis], output[axis], operand[axis]
        if isinstance(out, Partial) and out.op != "sum" and not (out.op == "avg" and _any(operands, axis, out)):
            raise LayoutError(
                f"the output is {out} on axis {axis!r}: no rank knows its part's share of the gradient; "
                f"reshard the operands to Replicate() on {axis!r} before the operation"
            )
        replicated = all(isinstance(each[axis], Replicate) for each in operands)
        passes_through = replicated and upstream == Partial("sum")
        needed[axis] = upstream if passes_through else Replicate() if isinstance(out, Partial) else out
        if passes_through:
            placements[axis] = upstream
        elif isinstance(placement, Replicate) and not replicated:
            placements[axis] = out if out == Partial("avg") else Partial("sum")
        else:
            placements[axis] = placement if isinstance(placement, Shard) else Replicate()
    needed_layout = output.replace(**needed)
    if needed_layout != grad:
        raise LayoutError(
            f"the output is ({output}), but its gradient arrived as ({grad}); reshard the output before it is used, so "
            f"that its gradient comes as ({needed_layout})",
            (needed_layout,),
        )
    averaged = [axis for axis, placement in placements.items() if placement == Partial("avg")]
    if averaged and Partial("sum") in placements.values():
        raise LayoutError(
            f"the gradient of an operand ({operand}) would be Partial by sum and, on axis {averaged[0]!r}, by avg; "
            f"reshard the other operand, which is P(avg), to Replicate() on {averaged[0]!r} before the operation"
        )
    return operand.replace(**placements)


def _any(operands: tuple[Layout, ...], axis: str, placement: Placement) -> bool:
    return any(each[axis] == placement for each in operands)
