"""The engine of most layout rules: an operation written by the indices of its operands, inferred per mesh axis.

"mk,kn->mn" describes a matrix product completely. An axis may shard a single index, in every operand with the
index. Where the output lacks the index, the output is Partial. Rules differ in their terms, and in the treatment
of Partial operands.

`nearest` searches the nearest layout of a single tensor which an operation takes, where the tensor's shape is known:
the layout for which the busiest rank receives the fewest elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

from ..arguments import as_int
from ..layout import Layout, LayoutError, overlap, volume
from ..placement import Partial, Placement, Replicate, Shard
from ..process_mesh import ProcessMesh

CANDIDATES = 2048  # combinations of placements; above, an axis either keeps its placement or replicates
TRIED = 256  # candidates asked about, nearest first; then all is replicated, which every operation takes
COUNTED_RANKS = 16  # ranks whose received elements are counted


OperandPlacements = tuple[Placement, ...]  # an axis's placement for each operand
Reason = Callable[[], str]  # the text of a reason, made on demand: the search for a remedy fails many times
SHOWN = 4  # operands to reshard listed in a message
IDEMPOTENT = ("avg", "min", "max")  # ops with op(x, x) == x


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, as layout rules see operations. A rule makes an Operation for `infer`."""

    name: str  #: the operation, in messages
    terms: tuple[str, ...]  #: per operand, a letter for each dim
    output: str  #: a letter for each dim of the output, "." for a new dim
    #: a function from the operands' placements on an axis, all Partial or replicated, to the output's placement; None
    #: where the result would be wrong
    partial: Callable[[OperandPlacements], Placement | None]
    #: the output's placement on an axis sharding an index which the output lacks; None: no axis may
    contracted: Partial | None = None
    whole: str = ""  #: indices which no axis may shard
    #: the reason, in messages, why no axis may shard an index of `whole`, or an index which the output lacks
    why_whole: str = ""
    operands: tuple[str, ...] = ()  #: the operands' names in messages; by default operand 0, operand 1, …

    def operand(self, position: int) -> str:
        """The operand's name in messages."""
        return self.operands[position] if self.operands else f"operand {position}"


def infer(operation: Operation, layouts: Sequence[Layout]) -> Layout:
    """Layout of the operation's output, from the operands' layouts.

    Raises LayoutError where the operands' shards do not fit together, or would not give parts of the output. The
    message and `LayoutError.nearest` name the nearest layouts which the operation takes.
    """
    layouts = [_resolve_dims(operation, position, layout) for position, layout in enumerate(layouts)]
    answer = judge(operation, layouts)
    if isinstance(answer, Layout):
        return answer
    nearest = _nearest(operation, layouts)
    changes = [
        f"{operation.operand(position)} to ({after})"
        for position, (before, after) in enumerate(zip(layouts, nearest, strict=True))
        if before != after
    ]
    if len(changes) > SHOWN:
        changes[SHOWN:] = [f"{len(changes) - SHOWN} more"]
    raise LayoutError(f"{operation.name}: {answer}; reshard {' and '.join(changes)}", tuple(nearest))


def judge(operation: Operation, layouts: Sequence[Layout]) -> Layout | str:
    """The output's layout; where there is none, the reason as text, for `infer` and for rules with a remedy."""
    mesh = one_mesh(layouts)
    placements: dict[str, Placement] = {}
    for axis in mesh.axis_names:
        placement = _output_on_axis(operation, tuple(layout[axis] for layout in layouts))
        if callable(placement):
            return f"on axis {axis!r} {placement()}"
        if not _is_compatible(placement, placements.values()):
            return f"the output would be {placement} on axis {axis!r} and Partial by another op on another axis"
        placements[axis] = placement
    orders: dict[str, tuple[str, ...]] = {}  # index -> the axes that shard the index, major first
    for position, (term, layout) in enumerate(zip(operation.terms, layouts, strict=True)):
        for dim, axes in layout.shard_order.items():
            order = orders.setdefault(term[dim], axes)
            if order != axes:
                return (
                    f"dim {dim} of {operation.operand(position)} is cut in the order {axes}, another operand in {order}"
                )
    majors_first = {axis: placements[axis] for axes in orders.values() for axis in axes}
    return Layout.in_order(mesh, majors_first | placements)


def _resolve_dims(operation: Operation, position: int, layout: Layout) -> Layout:
    """An operand's layout with each dim counted from the front.

    Raises LayoutError where a sharded dim is outside the operand.
    """
    ndim = len(operation.terms[position])
    for dim, axes in layout.shard_order.items():
        if not -ndim <= dim < ndim:
            raise LayoutError(
                f"{operation.name}: axis {axes[0]!r} shards dim {dim} of {operation.operand(position)}, which has "
                f"{ndim} dims; reshard it to Replicate() on {axes[0]!r}"
            )
    return layout.resolved((1,) * ndim)


def least_ndim(layouts: Sequence[Layout], *dims: int) -> int:
    """The smallest number of dims to include all of `dims` and all dims sharded by the layouts.

    For rules that get no shapes, and therefore do not know the number of dims.
    Raises LayoutError where a layout counts a dim from the end.
    """
    for layout in layouts:
        layout.check_counted()
    return 1 + max((*dims, *(dim for layout in layouts for dim in layout.shard_order)), default=-1)


def one_mesh(layouts: Sequence[Layout], operation: str = "") -> ProcessMesh:
    """The mesh of all layouts. operation: a name for messages.

    Raises LayoutError for layouts on different meshes, for no layouts, and for dims counted from the end.
    """
    if not layouts:
        raise LayoutError("no operands: give the layout of each")
    first = layouts[0].mesh
    for layout in layouts:
        layout.check_counted()
        if layout.mesh != first:
            distinct = str(first) != str(layout.mesh)
            names = (first, layout.mesh) if distinct else (f"{mesh} {mesh.digest[:8]}" for mesh in (first, layout.mesh))
            where = f"{operation}: " if operation else ""
            raise LayoutError(
                f"{where}operands lie on different meshes: {' and '.join(map(str, names))}; reshard one to the other"
            )
    return first


def letters(count: int) -> str:
    """A distinct index for each of `count` dims: a, b, …; beyond z, characters that messages do not show."""
    return "".join(chr(ord("a") + i) if i < 26 else chr(0x100 + i) for i in range(count))


def check_dims(name: str, dims: int | Sequence[int], ndim: int | None = None) -> tuple[int, ...]:
    """`dims` as a tuple of ints. name: the operation, in messages.

    Raises ValueError for a negative dim, a repeated dim, and, where `ndim` is given, a dim beyond it.
    """
    chosen = tuple(as_int(f"{name}: a dim", dim) for dim in (dims if isinstance(dims, Iterable) else (dims,)))
    for dim in chosen:
        if dim < 0 or (ndim is not None and dim >= ndim):
            known = "" if ndim is None else f", which has {ndim}"
            raise ValueError(f"{name}: dim {dim} is not a dim of the tensor{known}; count dims from the front, from 0")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"{name}: dims {chosen} name a dim twice; name each once")
    return chosen


def pass_same_reduction(placements: OperandPlacements) -> Partial | None:
    """The rule for Partial operands of an operation which only moves or picks elements.

    Where all operands are Partial by the same op, the output is Partial by this op; None otherwise. A
    replicated operand counts as Partial by avg, min and max.
    """
    found = {placement for placement in placements if isinstance(placement, Partial)}
    if len(found) != 1:
        return None
    (partial,) = found
    return partial if partial.op in IDEMPOTENT or set(placements) == found else None


def never(placements: OperandPlacements) -> None:
    """The rule for Partial operands of an operation through which no reduction passes."""


def _output_on_axis(operation: Operation, placements: OperandPlacements) -> Placement | Reason:
    """The output's placement on an axis, or the reason why there is none."""
    indices = {term[p.dim] for term, p in zip(operation.terms, placements, strict=True) if isinstance(p, Shard)}
    if any(isinstance(placement, Partial) for placement in placements):
        result = None if indices else operation.partial(placements)
        return result or (lambda: f"{_placements_text(placements)}: the ranks' outputs would not reduce to the result")
    if not indices:
        return Replicate()
    if len(indices) > 1:
        return lambda: f"{_shards_text(operation, placements)}, which do not go together"
    (index,) = indices
    for position, (term, placement) in enumerate(zip(operation.terms, placements, strict=True)):
        if term.count(index) > 1:
            return lambda: f"{_shards_text(operation, placements)}, which is the same index as another of its dims"
        if index in term and not isinstance(placement, Shard):
            unsharded = f"dim {term.index(index)} of {operation.operand(position)}"
            return lambda: f"{_shards_text(operation, placements)}, but not {unsharded}"
    if index not in operation.whole:
        if index in operation.output:
            return Shard(operation.output.index(index))
        if operation.contracted:
            return operation.contracted
    return lambda: f"{_placements_text(placements)}: {operation.why_whole}"


def _placements_text(placements: OperandPlacements) -> str:
    return (
        "the placement is " + str(placements[0])
        if len(placements) == 1
        else "operands are " + ", ".join(map(str, placements))
    )


def _shards_text(operation: Operation, placements: OperandPlacements) -> str:
    dims = (f"dim {p.dim} of {operation.operand(i)}" for i, p in enumerate(placements) if isinstance(p, Shard))
    return f"{_placements_text(placements)}: the axis shards {' and '.join(dims)}"


def _is_compatible(placement: Placement, remaining_placements: Iterable[Placement]) -> bool:
    """Whether a tensor can have this placement on an axis and `remaining_placements` on the remaining axes.

    Partial by two different ops would make the value depend on the order of the reductions.
    """
    return not isinstance(placement, Partial) or all(
        o == placement for o in remaining_placements if isinstance(o, Partial)
    )


def _nearest(operation: Operation, layouts: Sequence[Layout]) -> list[Layout]:
    """The nearest layouts that the operation takes, a layout per operand.

    Chosen axis by axis for the fewest bytes moved, as if all operands had the same size.
    """
    mesh = layouts[0].mesh
    chosen: dict[str, OperandPlacements] = {}
    output: list[Placement] = []
    for axis in mesh.axis_names:
        current = tuple(layout[axis] for layout in layouts)
        answers = {choice: _output_on_axis(operation, choice) for choice in _choices(operation, current)}
        fitting = {c: a for c, a in answers.items() if not callable(a) and _is_compatible(a, output)}
        chosen[axis] = min(fitting, key=partial(_cost, mesh.axis_size(axis), current))
        output.append(fitting[chosen[axis]])
    orders: dict[str, list[str]] = {}  # index -> the axes that will shard the index; present axes first
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


def _choices(operation: Operation, current: OperandPlacements) -> list[OperandPlacements]:
    """The operands' placements to try on an axis.

    In order: the placements as given. For each index, the operands which have the index sharded by it. All Partial
    operands kept, then each of these alone. For each op of a Partial operand, every operand Partial by this op, except
    operands Partial by another. Last, all replicated. Operands not mentioned replicate.
    """
    whole: OperandPlacements = tuple(Replicate() for _ in current)
    choices = [current]
    for index in dict.fromkeys("".join(operation.terms)):
        choices.append(tuple(Shard(term.index(index)) if index in term else Replicate() for term in operation.terms))
    choices.append(tuple(p if isinstance(p, Partial) else Replicate() for p in current))
    for position, placement in enumerate(current):
        if isinstance(placement, Partial):
            choices.append((*whole[:position], placement, *whole[position + 1 :]))
    partials = dict.fromkeys(p for p in current if isinstance(p, Partial))
    choices += [tuple(Replicate() if isinstance(p, Partial) and p != op else op for p in current) for op in partials]
    return [*choices, whole]


def _cost(parts: int, current: OperandPlacements, target: OperandPlacements) -> tuple[int, int]:
    """(bytes that a rank receives, in units of L (p - 1) / p**2; number of operands that change)

    parts: the axis's size p. L: the size of every operand, taken to be equal.
    """
    changed = [(before, after) for before, after in zip(current, target, strict=True) if before != after]
    return sum(_received(parts, before, after) for before, after in changed), len(changed)


def _received(parts: int, before: Placement, after: Placement) -> int:
    """The cost of changing an operand's placement, in the units of `_cost`."""
    match before, after:
        case Replicate(), _:  # a slice
            return 0
        case Shard(), Shard():  # an all-to-all
            return 1
        case (Partial(), Shard()) | (Shard(), Replicate()):  # a reduce-scatter, an all-gather
            return parts
    return 2 * parts  # an all-reduce


def nearest(layout: Layout, shape: tuple[int, ...], takes: Callable[[Layout], bool]) -> Layout:
    """The layout accepted by `takes` that costs the fewest received elements to reach from `layout`.

    Among equally cheap layouts, the fewest axes change. Where `takes` accepts no candidate, all axes replicate.
    """
    replicated = Layout(layout.mesh)
    ranked = sorted(
        dict.fromkeys(_candidates(layout, shape)),
        key=lambda after: (
            _received_elements(layout, after, shape),
            sum(after[a] != layout[a] for a in layout.mesh.axis_names),
        ),
    )
    return next((after for after in ranked[:TRIED] if takes(after)), replicated)


def _candidates(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Layouts to try: new placements for the axes that do not replicate now.

    Axes that shard the same dim are tried in their present order and in the mesh's order.
    """
    axes = [axis for axis in layout.mesh.axis_names if not isinstance(layout[axis], Replicate)]
    dims: list[Placement] = [Shard(dim) for dim, size in enumerate(shape) if size > 1]
    options = [list(dict.fromkeys((layout[axis], *dims, Replicate()))) for axis in axes]
    if math.prod(map(len, options)) > CANDIDATES:
        options = [[layout[axis], Replicate()] for axis in axes]
    for placements in islice(product(*options), CANDIDATES):
        chosen = dict(zip(axes, placements, strict=True))
        yield layout.replace(**chosen)
        yield Layout(layout.mesh, chosen)


def _received_elements(before: Layout, after: Layout, shape: tuple[int, ...]) -> float:
    """Elements received by the busiest of the first ranks: elements needed and not held, and for reductions."""
    return max(
        volume(needed)
        - volume(overlap(needed, before.local_slices(shape, rank)))
        + _reduced(before, after, volume(needed))
        for rank in islice(before.mesh, COUNTED_RANKS)
        for needed in [after.local_slices(shape, rank)]
    )


def _reduced(before: Layout, after: Layout, elements: int) -> float:
    """Elements received by a rank for reductions. elements: the rank's elements after the reductions.

    A reduce-scatter receives p - 1 times its result; an all-reduce receives 2 (p - 1) / p of the tensor.
    """
    total = 0.0
    for axis, size in zip(before.mesh.axis_names, before.mesh.shape, strict=True):
        if isinstance(before[axis], Partial) and before[axis] != after[axis]:
            total += elements * (size - 1) * (1 if isinstance(after[axis], Shard) else 2 / size)
    return total
