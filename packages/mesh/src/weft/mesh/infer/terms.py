"""What most rules share: an operation written as its operands' indices, inferred one mesh axis at a time.

"mk,kn->mn" says all of a matrix product: an axis may shard one index, of every operand that has it; if the output lacks
that index, what is left is Partial. The rules differ in how they write an operation, and in what they do with Partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_letters

from ..errors import LayoutError
from ..layout import Layout
from ..placement import Partial, Placement, Replicate, Shard
from ..process_mesh import ProcessMesh

Placements = tuple[Placement, ...]  # of all operands on one axis
IDEMPOTENT = ("avg", "min", "max")  # of one value and itself these give that value


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as its rules see it.

    terms: for each operand, a letter for each dim. output: the same for the output, with "." for a new dim.
    partial: the output's placement on an axis where the operands are Partial or replicated; None where it is wrong.
    contracted: what is left where an axis shards an index that the output lacks.
    whole: indices that no axis may shard, and why. depends: those of which some axes may, so no remedy tries another.
    """

    name: str
    terms: tuple[str, ...]
    output: str
    partial: Callable[[Placements], Placement | None]
    contracted: Partial | None = None
    whole: str = ""
    why_whole: str = ""
    depends: str = ""
    operands: tuple[str, ...] = ()

    def operand(self, position: int) -> str:
        """What messages call an operand."""
        return self.operands[position] if self.operands else f"operand {position}"


def infer(operation: Operation, layouts: Sequence[Layout]) -> Layout:
    """The output's layout.

    Raises LayoutError where the local parts do not fit together, or would not give the output's.
    """
    mesh = one_mesh(layouts)
    for position, (term, layout) in enumerate(zip(operation.terms, layouts, strict=True)):
        for dim, axes in layout.shard_order.items():
            if dim >= len(term):
                raise LayoutError(
                    f"{operation.name}: axis {axes[0]!r} shards dim {dim} of {operation.operand(position)}, which has "
                    f"{len(term)} dims"
                )
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        placement = _on_axis(operation, tuple(layout[axis] for layout in layouts))
        if isinstance(placement, str):
            raise _refusal(operation, layouts, f"on axis {axis!r} {placement}")
        if not _goes_with(placement, placements.values()):
            raise _refusal(
                operation, layouts, f"the output would be {placement} on axis {axis!r} and another on others"
            )
        placements[axis] = placement
    orders: dict[str, tuple[str, ...]] = {}  # of each index, the axes that shard it, major first
    for term, layout in zip(operation.terms, layouts, strict=True):
        for dim, axes in layout.shard_order.items():
            order = orders.setdefault(term[dim], axes)
            if order != axes:
                raise _refusal(operation, layouts, f"index {term[dim]!r} is cut in the orders {order} and {axes}")
    majors_first = {axis: placements[axis] for axes in orders.values() for axis in axes}
    return Layout.in_order(mesh, majors_first | placements)


def one_mesh(layouts: Sequence[Layout]) -> ProcessMesh:
    """The mesh of all layouts; LayoutError where there are two."""
    first = layouts[0].mesh
    for layout in layouts:
        if layout.mesh != first:
            raise LayoutError(f"operands lie on different meshes: {first} and {layout.mesh}; reshard one to the other")
    return first


def letters(count: int) -> str:
    """An index for each of `count` dims."""
    if count > len(ascii_letters):
        raise ValueError(f"{count} dims are more than the {len(ascii_letters)} that layout inference takes")
    return ascii_letters[:count]


def one_reduction(placements: Placements) -> Partial | None:
    """How all operands are Partial, if they are so alike: whatever picks elements gives the same of what it picks.

    A replicated operand is its own average, minimum and maximum.
    """
    found = {placement for placement in placements if isinstance(placement, Partial)}
    if len(found) != 1:
        return None
    (partial,) = found
    return partial if partial.op in IDEMPOTENT or set(placements) == found else None


def never(placements: Placements) -> None:
    """For operations that no reduction passes through."""


def _on_axis(operation: Operation, placements: Placements) -> Placement | str:
    """The output's placement, or why there is none."""
    indices = {term[p.dim] for term, p in zip(operation.terms, placements, strict=True) if isinstance(p, Shard)}
    shown = "it is " + str(placements[0]) if len(placements) == 1 else "operands are " + ", ".join(map(str, placements))
    if any(isinstance(placement, Partial) for placement in placements):
        result = None if indices else operation.partial(placements)
        return result or f"{shown}: what the ranks compute would not reduce to the result"
    if not indices:
        return Replicate()
    if len(indices) > 1:
        return f"{shown}: it shards the indices {sorted(indices)}, and may shard one"
    (index,) = indices
    for term, placement in zip(operation.terms, placements, strict=True):
        if term.count(index) > 1:
            return f"{shown}: it shards index {index!r}, which {term!r} has twice"
        if index in term and not isinstance(placement, Shard):
            return f"{shown}: it shards index {index!r} of some alone"
    if index in operation.whole:
        return f"{shown}: {operation.why_whole}"
    if index in operation.output:
        return Shard(operation.output.index(index))
    return operation.contracted or f"{shown}: {operation.why_whole}"


def _goes_with(placement: Placement, others: Iterable[Placement]) -> bool:
    """Whether a tensor can lie so on one axis and so on others: by two reductions its value would depend on their order."""
    return not isinstance(placement, Partial) or all(o == placement for o in others if isinstance(o, Partial))


def _refusal(operation: Operation, layouts: Sequence[Layout], why: str) -> LayoutError:
    wanted = _nearest(operation, layouts)
    changes = [
        f"{operation.operand(position)} to ({after})"
        for position, (before, after) in enumerate(zip(layouts, wanted, strict=True))
        if before != after
    ]
    return LayoutError(f"{operation.name}: {why}; reshard {' and '.join(changes)}", tuple(wanted))


def _nearest(operation: Operation, layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts that the operation takes, for which the fewest bytes move if all operands are of one size."""
    mesh = layouts[0].mesh
    chosen: dict[str, Placements] = {}
    output: list[Placement] = []
    for axis in mesh.axis_names:
        given = tuple(layout[axis] for layout in layouts)
        answers = {choice: _on_axis(operation, choice) for choice in _choices(operation, given)}
        fitting = {c: a for c, a in answers.items() if not isinstance(a, str) and _goes_with(a, output)}
        chosen[axis] = min(fitting, key=partial(_cost, mesh.axis_size(axis), given))
        output.append(fitting[chosen[axis]])
    orders: dict[str, list[str]] = {}  # of each index, the axes that will shard it: as they do where they do already
    for number, layout in enumerate(layouts):
        axes = (axis for order in layout.shard_order.values() for axis in order)
        for axis in dict.fromkeys((*axes, *mesh.axis_names)):
            if isinstance(placement := chosen[axis][number], Shard):
                order = orders.setdefault(operation.terms[number][placement.dim], [])
                order += [] if axis in order else [axis]
    majors_first = dict.fromkeys(axis for order in orders.values() for axis in order)
    return [
        Layout.in_order(mesh, {axis: chosen[axis][number] for axis in (majors_first | dict.fromkeys(mesh.axis_names))})
        for number in range(len(layouts))
    ]


def _choices(operation: Operation, given: Placements) -> list[Placements]:
    """What an axis could do: shard one index; keep what is Partial, or one of it, and replicate the rest."""
    whole: Placements = tuple(Replicate() for _ in given)
    choices = [given]
    for index in dict.fromkeys("".join(operation.terms).translate(dict.fromkeys(map(ord, operation.depends)))):
        choices.append(tuple(Shard(term.index(index)) if index in term else Replicate() for term in operation.terms))
    choices.append(tuple(p if isinstance(p, Partial) else Replicate() for p in given))
    for position, placement in enumerate(given):
        if isinstance(placement, Partial):
            choices.append((*whole[:position], placement, *whole[position + 1 :]))
    return [*choices, whole]


def _cost(parts: int, given: Placements, wanted: Placements) -> tuple[int, int]:
    """(bytes that a rank receives if all operands are of one size, in L (p - 1) / p**2; operands that change)

    parts: the axis's size p. L: the size of an operand.
    """
    changed = [(before, after) for before, after in zip(given, wanted, strict=True) if before != after]
    return sum(_received(parts, before, after) for before, after in changed), len(changed)


def _received(parts: int, before: Placement, after: Placement) -> int:
    match before, after:
        case Replicate(), _:  # a slice
            return 0
        case Shard(), Shard():  # an all-to-all
            return 1
        case (Partial(), Shard()) | (Shard(), Replicate()):  # a reduce-scatter, an all-gather
            return parts
    return 2 * parts  # an all-reduce
