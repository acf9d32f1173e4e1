"""Which layout an operation gives, from the layouts it takes; one axis at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .errors import LayoutError
from .layout import Layout
from .placement import Partial, Placement, Replicate, Shard
from .process_mesh import ProcessMesh


@lru_cache(maxsize=65536)
def einsum(equation: str, *layouts: Layout) -> Layout:
    """Layout of `torch.einsum(equation, ...)` computed on the local parts.

    An axis that shards a contracted index leaves the output Partial(sum); one that shards a kept index shards the
    output. One operand may be Partial(sum) on an axis where the others replicate, for einsum is linear in each.
    Raises LayoutError where the local parts do not fit together, and names the reshard.
    """
    terms, output = _terms(equation, layouts)
    mesh = _one_mesh(layouts)
    placements = {
        axis: _einsum_axis(equation, terms, output, axis, [layout[axis] for layout in layouts])
        for axis in mesh.axis_names
    }
    orders: dict[str, tuple[str, ...]] = {}  # per index, the axes that shard it, major first
    for term, layout in zip(terms, layouts, strict=True):
        for dim, axes in layout.shard_order.items():
            if orders.setdefault(term[dim], axes) != axes:
                raise LayoutError(
                    f"einsum {equation!r}: index {term[dim]!r} is sharded in the orders {orders[term[dim]]} and {axes}; "
                    f"reshard an operand so that they agree"
                )
    majors_first = {axis: placements[axis] for axes in orders.values() for axis in axes}
    return Layout.in_order(mesh, majors_first | placements)


def _terms(equation: str, layouts: Sequence[Layout]) -> tuple[list[str], str]:
    """The indices of each operand and of the output; LayoutError where the layouts do not fit them."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or not all(index.isalpha() or index == "," for index in inputs + output):
        raise LayoutError(f"einsum {equation!r}: name each index by a letter, the output's too: 'mk,kn->mn'")
    if len(terms) != len(layouts):
        raise LayoutError(f"einsum {equation!r} has {len(terms)} operands, got {len(layouts)} layouts")
    for position, (term, layout) in enumerate(zip(terms, layouts, strict=True)):
        for dim, axes in layout.shard_order.items():
            if dim >= len(term):
                raise LayoutError(
                    f"einsum {equation!r}: axis {axes[0]!r} shards dim {dim} of operand {position} ({term!r}), which has "
                    f"{len(term)} dims"
                )
            if term.count(term[dim]) > 1:
                raise LayoutError(
                    f"einsum {equation!r}: axis {axes[0]!r} shards index {term[dim]!r}, which operand {position} "
                    f"({term!r}) has twice; reshard it to Replicate() on {axes[0]!r}"
                )
    return terms, output


def _einsum_axis(
    equation: str, terms: Sequence[str], output: str, axis: str, placements: Sequence[Placement]
) -> Placement:
    indices = {term[p.dim] for term, p in zip(terms, placements, strict=True) if isinstance(p, Shard)}
    partial = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    shown = ", ".join(map(str, placements))
    if partial:
        op = placements[partial[0]]
        if len(partial) > 1 or indices or op != Partial("sum"):
            raise LayoutError(
                f"einsum {equation!r}: on axis {axis!r} the operands are {shown}; a Partial(sum) operand goes with "
                f"replicated ones alone: reshard operand {partial[0]} to Replicate() on {axis!r}"
            )
        return Partial("sum")
    if not indices:
        return Replicate()
    if len(indices) > 1:
        raise LayoutError(
            f"einsum {equation!r}: axis {axis!r} shards the indices {sorted(indices)} (operands are {shown}); "
            f"reshard an operand so that {axis!r} shards one index alone"
        )
    (index,) = indices
    for position, (term, placement) in enumerate(zip(terms, placements, strict=True)):
        if index in term and not isinstance(placement, Shard):
            raise LayoutError(
                f"einsum {equation!r}: axis {axis!r} shards index {index!r}, but operand {position} ({term!r}) is "
                f"{placement} there; reshard it to Shard({term.index(index)}) on {axis!r}"
            )
    return Shard(output.index(index)) if index in output else Partial("sum")


@lru_cache(maxsize=65536)
def elementwise(name: str, linear: bool, *layouts: Layout) -> Layout:
    """Layout of an elementwise operation on tensors of one shape: all operands must have the same layout.

    A Partial(sum) passes where the operation is linear in all its operands together, as an addition is.
    """
    first = layouts[0]
    for position, layout in enumerate(layouts):
        if layout != first:
            raise LayoutError(
                f"{name} takes operands of one layout; operand 0 is ({first}), operand {position} is ({layout}): "
                f"reshard one to the other"
            )
        if layout.is_partial() and not (linear and set(_partials(layout)) == {Partial("sum")}):
            raise LayoutError(
                f"{name} is not linear, and operand {position} is ({layout}); reshard it to Replicate() first"
            )
    return first


def whole(name: str, what: str, layout: Layout, dim: int) -> None:
    """Raises LayoutError where `layout` shards `dim` or is Partial; for operations that need that dim whole."""
    for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True):
        if placement == Shard(dim) or isinstance(placement, Partial):
            raise LayoutError(
                f"{name} needs dim {dim} of {what} whole, but it is {placement} on axis {axis!r}; "
                f"reshard it to Replicate() on {axis!r}"
            )


@lru_cache(maxsize=65536)
def gradient(output: Layout, grad: Layout, operand: Layout, operands: tuple[Layout, ...]) -> Layout:
    """Layout of an operand's gradient, computed on local parts from a gradient that lies as `grad`.

    For operations whose local parts are independent: where the output is sharded, each rank sees the part of the
    gradient that its own elements bring. So, on each axis: a Partial gradient stays Partial; a sharded operand's
    gradient is sharded as it is; a replicated operand's is Partial where another operand was sharded or Partial.
    Raises LayoutError for a gradient that is Partial where the operands are not whole: it must be reduced first.
    """
    mesh = _one_mesh((output, grad, *operands))
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        got, out, own = grad[axis], output[axis], operand[axis]
        if isinstance(out, Partial):
            fits = isinstance(got, Replicate)
        else:
            replicated = all(isinstance(other[axis], Replicate) for other in operands)
            fits = got == out or (replicated and got == Partial("sum"))
        if not fits:
            wanted = "R" if isinstance(out, Partial) else f"{out}"
            raise LayoutError(
                f"the output is {out} on axis {axis!r}, but its gradient arrived as {got}; reshard the output before "
                f"it is used, so that the gradient comes as {wanted}"
            )
        if isinstance(got, Partial):
            placements[axis] = got
        elif isinstance(own, Shard):
            placements[axis] = own
        elif isinstance(own, Replicate) and any(not isinstance(other[axis], Replicate) for other in operands):
            placements[axis] = Partial("sum")
        else:
            placements[axis] = Replicate()
    if grad.shard_order != output.shard_order:
        raise LayoutError(f"the output is ({output}), but its gradient arrived as ({grad}); reshard one to the other")
    return operand.replace(**placements)


def _partials(layout: Layout) -> list[Partial]:
    return [placement for placement in layout.placements if isinstance(placement, Partial)]


def _one_mesh(layouts: Sequence[Layout]) -> ProcessMesh:
    first = layouts[0].mesh
    for layout in layouts:
        if layout.mesh != first:
            raise LayoutError(f"operands lie on different meshes: {first} and {layout.mesh}; reshard one to the other")
    return first
