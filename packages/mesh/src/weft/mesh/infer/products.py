"""Layout rule of sums of products: matrix products, dot products, scalings, outer products."""

from __future__ import annotations

from functools import lru_cache

from ..layout import Layout, LayoutError
from ..placement import Partial, Placement
from .terms import Operation, Placements, infer, pass_same_reduction


@lru_cache(maxsize=65536)
def einsum(equation: str, *layouts: Layout, name: str = "", operands: tuple[str, ...] = ()) -> Layout:
    """Layout of `torch.einsum(equation, ...)` where each rank computes on its own shards.

    An axis that shards a contracted index leaves the output Partial(sum). An axis that shards a kept index shards the
    output. Because einsum is linear in each operand, Partial(sum) and Partial(avg) pass where a single operand is
    Partial and the rest replicate. Where nothing is contracted, a sole operand passes with any reduction, and several
    operands pass where all are Partial(product).

    name, operands: names of the operation and its operands in messages; by default the equation and its terms.
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

    def partial(placements: Placements) -> Placement | None:
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
