"""What most rules share: an operation written as its operands' indices, inferred one mesh axis at a time.

"mk,kn->mn" says all of a matrix product: an axis may shard one index, of every operand that has it; if the output lacks
that index, what is left is Partial. The rules differ in how they write an operation, and in what they do with Partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..arguments import as_int
from ..layout import Layout, LayoutError
from ..placement import Partial, Placement, Replicate, Shard
from ..process_mesh import ProcessMesh

Placements = tuple[Placement, ...]  # of all operands on one axis
Why = Callable[[], str]  # a reason, put in words for those who ask: a remedy tries many that fail
SHOWN = 4  # of the operands to reshard, in a message
IDEMPOTENT = ("avg", "min", "max")  # of one value and itself these give that value


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as its rules see it.

    terms: for each operand, a letter for each dim. output: the same for the output, with "." for a new dim.
    partial: the output's placement on an axis where the operands are Partial or replicated; None where it is wrong.
    contracted: what is left where an axis shards an index that the output lacks.
    whole: indices that no axis may shard, and why.
    """

    name: str
    terms: tuple[str, ...]
    output: str
    partial: Callable[[Placements], Placement | None]
    contracted: Partial | None = None
    whole: str = ""
    why_whole: str = ""
    operands: tuple[str, ...] = ()

    def operand(self, position: int) -> str:
        """What messages call an operand."""
        return self.operands[position] if self.operands else f"operand {position}"


def infer(operation: Operation, layouts: Sequence[Layout]) -> Layout:
    """The output's layout.

    Raises LayoutError where the local parts do not fit together, or would not give the output's.
    """
    layouts = [_counted(operation, position, layout) for position, layout in enumerate(layouts)]
    answer = judge(operation, layouts)
    if isinstance(answer, Layout):
        return answer
    wanted = _nearest(operation, layouts)
    changes = [
        f"{operation.operand(position)} to ({after})"
        for position, (before, after) in enumerate(zip(layouts, wanted, strict=True))
        if before != after
    ]
    if len(changes) > SHOWN:
        changes[SHOWN:] = [f"{len(changes) - SHOWN} more"]
    raise LayoutError(f"{operation.name}: {answer}; reshard {' and '.join(changes)}", tuple(wanted))


def judge(operation: Operation, layouts: Sequence[Layout]) -> Layout | str:
    """The output's layout, or why there is none."""
    mesh = one_mesh(layouts)
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        placement = _on_axis(operation, tuple(layout[axis] for layout in layouts))
        if callable(placement):
            return f"on axis {axis!r} {placement()}"
        if not _goes_with(placement, placements.values()):
            return f"the output would be {placement} on axis {axis!r} and another on others"
        placements[axis] = placement
    orders: dict[str, tuple[str, ...]] = {}  # of each index, the axes that shard it, major first
    for position, (term, layout) in enumerate(zip(operation.terms, layouts, strict=True)):
        for dim, axes in layout.shard_order.items():
            order = orders.setdefault(term[dim], axes)
            if order != axes:
                return (
                    f"dim {dim} of {operation.operand(position)} is cut in the order {axes}, another operand in {order}"
                )
    majors_first = {axis: placements[axis] for axes in orders.values() for axis in axes}
    return Layout.in_order(mesh, majors_first | placements)


def _counted(operation: Operation, position: int, layout: Layout) -> Layout:
    """An operand's layout, each dim counted from the front. Raises LayoutError for a dim that the operand does not have."""
    ndim = len(operation.terms[position])
    for dim, axes in layout.shard_order.items():
        if not -ndim <= dim < ndim:
            raise LayoutError(
                f"{operation.name}: axis {axes[0]!r} shards dim {dim} of {operation.operand(position)}, which has "
                f"{ndim} dims; reshard it to Replicate() on {axes[0]!r}"
            )
    return layout.resolved((1,) * ndim)


def least_ndim(layouts: Sequence[Layout], *dims: int) -> int:
    """The dims that there are at least, where `dims` are named. Raises LayoutError for one of a layout's that is counted from the end."""
    for layout in layouts:
        layout.check_counted()
    return 1 + max((*dims, *(dim for layout in layouts for dim in layout.shard_order)), default=-1)


def one_mesh(layouts: Sequence[Layout], operation: str = "") -> ProcessMesh:
    """The mesh of all layouts; LayoutError where there are two, or no layouts, in which `operation` is named."""
    if not layouts:
        raise LayoutError("no operands: give the layout of each")
    first = layouts[0].mesh
    for layout in layouts:
        layout.check_counted()
        if layout.mesh != first:
            told = str(first) != str(layout.mesh)
            names = (first, layout.mesh) if told else (f"{mesh} {mesh.digest[:8]}" for mesh in (first, layout.mesh))
            where = f"{operation}: " if operation else ""
            raise LayoutError(
                f"{where}operands lie on different meshes: {' and '.join(map(str, names))}; reshard one to the other"
            )
    return first


def letters(count: int) -> str:
    """An index for each of `count` dims; beyond the alphabet, signs that no one sees."""
    return "".join(chr(ord("a") + i) if i < 26 else chr(0x100 + i) for i in range(count))


def checked_dims(name: str, dims: int | Sequence[int], ndim: int | None = None) -> tuple[int, ...]:
    """Dims as a tuple. ValueError for one that is below 0 or, where `ndim` is known, that there is not, or stands twice."""
    chosen = tuple(as_int(f"{name}: a dim", dim) for dim in (dims if isinstance(dims, Iterable) else (dims,)))
    for dim in chosen:
        if dim < 0 or (ndim is not None and dim >= ndim):
            there_are = "" if ndim is None else f"; there are {ndim}"
            raise ValueError(f"{name}: dim {dim} is none of the tensor's{there_are}; count from the front, from 0 on")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"{name}: dims {chosen} name one twice; name each once")
    return chosen


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


def _on_axis(operation: Operation, placements: Placements) -> Placement | Why:
    """The output's placement, or why there is none."""
    indices = {term[p.dim] for term, p in zip(operation.terms, placements, strict=True) if isinstance(p, Shard)}
    if any(isinstance(placement, Partial) for placement in placements):
        result = None if indices else operation.partial(placements)
        return result or (lambda: f"{_shown(placements)}: what the ranks compute would not reduce to the result")
    if not indices:
        return Replicate()
    if len(indices) > 1:
        return lambda: f"{_sharded(operation, placements)}, which do not go together"
    (index,) = indices
    for position, (term, placement) in enumerate(zip(operation.terms, placements, strict=True)):
        if term.count(index) > 1:
            return lambda: f"{_sharded(operation, placements)}, which is the same index as another dim of it"
        if index in term and not isinstance(placement, Shard):
            other = f"dim {term.index(index)} of {operation.operand(position)}"
            return lambda: f"{_sharded(operation, placements)}, but not {other}"
    if index not in operation.whole:
        if index in operation.output:
            return Shard(operation.output.index(index))
        if operation.contracted:
            return operation.contracted
    return lambda: f"{_shown(placements)}: {operation.why_whole}"


def _shown(placements: Placements) -> str:
    return "it is " + str(placements[0]) if len(placements) == 1 else "operands are " + ", ".join(map(str, placements))


def _sharded(operation: Operation, placements: Placements) -> str:
    dims = (f"dim {p.dim} of {operation.operand(i)}" for i, p in enumerate(placements) if isinstance(p, Shard))
    return f"{_shown(placements)}: it shards {' and '.join(dims)}"


def _goes_with(placement: Placement, others: Iterable[Placement]) -> bool:
    """Whether a tensor can lie so on one axis and so on others: by two reductions its value would depend on their order."""
    return not isinstance(placement, Partial) or all(o == placement for o in others if isinstance(o, Partial))


def _nearest(operation: Operation, layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts that the operation takes; an axis at a time, those for which the fewest bytes move if all operands are of one size."""
    mesh = layouts[0].mesh
    chosen: dict[str, Placements] = {}
    output: list[Placement] = []
    for axis in mesh.axis_names:
        given = tuple(layout[axis] for layout in layouts)
        answers = {choice: _on_axis(operation, choice) for choice in _choices(operation, given)}
        fitting = {c: a for c, a in answers.items() if not callable(a) and _goes_with(a, output)}
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
    """What an axis could do: shard one index; keep what is Partial, or one of it, or let all be so; replicate the rest."""
    whole: Placements = tuple(Replicate() for _ in given)
    choices = [given]
    for index in dict.fromkeys("".join(operation.terms)):
        choices.append(tuple(Shard(term.index(index)) if index in term else Replicate() for term in operation.terms))
    choices.append(tuple(p if isinstance(p, Partial) else Replicate() for p in given))
    for position, placement in enumerate(given):
        if isinstance(placement, Partial):
            choices.append((*whole[:position], placement, *whole[position + 1 :]))
    partials = dict.fromkeys(p for p in given if isinstance(p, Partial))
    choices += [tuple(Replicate() if isinstance(p, Partial) and p != op else op for p in given) for op in partials]
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
