"""The layout of an operand's gradient, for operations whose local parts do not depend on one another."""

from __future__ import annotations

from functools import lru_cache

from ..errors import LayoutError
from ..layout import Layout
from ..placement import Partial, Placement, Replicate, Shard
from .terms import one_mesh


@lru_cache(maxsize=65536)
def gradient(output: Layout, grad: Layout, operand: Layout, operands: tuple[Layout, ...]) -> Layout:
    """Layout of an operand's gradient, computed on local parts from a gradient that lies as `grad`.

    The gradient is that of the whole value, so of a Partial one it is replicated. On each axis, a gradient that is
    Partial(sum) stays so; a sharded operand's lies as the operand; a replicated operand's is Partial where another
    operand is not replicated, as each rank sees what its own part of that one brings.
    Raises LayoutError for a gradient that lies otherwise than the output, or is Partial where the operands are not whole;
    and for one that would be Partial by two reductions.
    """
    mesh = one_mesh((output, grad, *operands))
    needed: dict[str, Placement] = {}
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        got, out, own = grad[axis], output[axis], operand[axis]
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
    if {Partial("sum"), Partial("avg")} <= set(placements.values()):
        raise LayoutError(
            f"the gradient of an operand ({operand}) would be Partial by sum and by avg, whose order would matter; reshard "
            f"the operand that is P(avg) to Replicate() before it is used"
        )
    return operand.replace(**placements)
