"""Search for the cheapest steps between two layouts of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from weft.mesh import Layout, Partial, Shard

from .links import Links
from .moves import Move, Moves, Way
from .pricing import total
from .steps import AllGather, AllReduce, AllToAll, ReduceExchange, ReduceScatter, Slice, Step
from .task import Task
from .ways import Ways

Fits = Callable[[tuple[Step, ...]], bool]
WAYS = 256  # ways priced with a topology or a memory limit; 60 us each, measured on one CPU core


def cheapest(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    *,
    itemsize: int = 1,
    topology: Links | None = None,
    fits: Fits | None = None,
) -> tuple[Step, ...] | None:
    """Steps from `src` to `dst`, layouts of the same mesh; None where `fits` accepts none of the ways found.

    topology: with it, the steps take the fewest seconds for elements of `itemsize` bytes. Without it, the busiest rank
        receives the fewest elements, and among equals the fewest transfers are made.
    fits: whether steps are acceptable, as within a memory limit; by default all are.
    The layouts must have passed `layouts.check_reductions`.
    """
    task = Task.between(src, dst, tuple(shape), topology)
    if fits is None and topology is None:
        return _steps(_of_fewest_elements(task), task)

    def key(way: Way) -> tuple[float, ...]:
        seconds = () if topology is None else (sum(_seconds(move, itemsize, topology) for move in way),)
        return (*seconds, *_elements_and_transfers(way))

    ways = Ways(task, Moves(task.sizes, thorough=True, apart=topology is not None))
    for way in sorted(islice(ways, WAYS), key=key):
        steps = _steps(way, task)
        if fits is None or fits(steps):
            return steps
    return None


def _of_fewest_elements(task: Task) -> Way:
    """The way with the fewest elements received, then the fewest transfers."""
    floor, found = task.floor(), None
    for way in Ways(task, Moves(task.sizes, thorough=False, apart=False)):
        key = _elements_and_transfers(way)
        if found is None or key < found[0]:
            found = (key, way)
        if key[0] <= floor and key[1] <= 1:
            break
    assert found is not None, "there is always an exchange, or a reduction and an exchange"
    return found[1]


def _elements_and_transfers(way: Way) -> tuple[int, int, int]:
    """The key to compare ways by: elements received, transfers, moves."""
    return sum(total(move.traffic) for move in way), sum(bool(move.traffic) for move in way), len(way)


def _seconds(move: Move, itemsize: int, topology: Links) -> float:
    """Predicted time of a move, for elements of `itemsize` bytes."""
    return topology.seconds({axis: (n, elements * itemsize) for axis, (n, elements) in move.traffic.items()})


def _steps(way: Way, task: Task) -> tuple[Step, ...]:
    """The steps of a way, with their layouts."""
    mesh, unreduced = task.src.mesh, set(task.reduced)
    passing = {axis: task.src[axis] for axis in mesh.axis_names if isinstance(task.src[axis], Partial)}
    steps: list[Step] = []
    for move in way:
        axis: str | tuple[str, ...] = move.axes if len(move.axes) != 1 else move.axes[0]
        dim: int | tuple[int, ...] = move.dims if len(move.dims) != 1 else move.dims[0]
        if move.kind is AllGather:
            steps.append(AllGather(axis, dim, move.apart))
        elif move.kind is ReduceScatter:
            unreduced -= set(move.axes)
            steps.append(ReduceScatter(axis, dim, task.op, move.apart))
        elif move.kind is AllReduce:
            unreduced -= set(move.axes)
            steps.append(AllReduce(axis, task.op))
        elif move.kind is Slice:
            steps.append(Slice(move.axes[0], move.dims[0]))
        elif move.kind is AllToAll:
            steps.append(AllToAll(move.axes[0], *move.dims))
        else:
            if move.kind is ReduceExchange:
                unreduced.clear()
            partial = {a: p for a, p in passing.items() if a in unreduced or a not in task.reduced}
            cut = {a: Shard(d) for d, order in enumerate(move.after) for a in order}
            steps.append(move.kind(Layout.in_order(mesh, cut | partial)))  # type: ignore[call-arg, arg-type]
    return (*steps, *task.last)
