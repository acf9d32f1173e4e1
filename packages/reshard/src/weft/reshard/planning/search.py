"""Search for the cheapest steps between two layouts of a mesh.

The task of a search: the spec to start from, the spec to reach, and the axes to reduce on the way.

Ways from one layout of a mesh to another: lists of moves, which the search prices.

Moves have the order of Rink et al. (2022), "Memory-efficient array redistribution through portable collective
communication": local slices, reductions, an exchange, gathers. Between layouts of Replicate and Shard, an exchange of
the elements needed and lacked by each rank attains the lower bound alone. Gathers come first, and are taken where they
attain the bound, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from weft.mesh import Layout, Partial, Placement, Replicate, Shard

from .layouts import Spec, appended, cutting, moving, spec_of
from .links import Links
from .moves import Move, Moves, Sizes, Way, sizes_of, total
from .steps import AllGather, AllReduce, AllToAll, MakePartial, ReduceExchange, ReduceScatter, Slice, Step

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


@dataclass(frozen=True, slots=True)
class Task:
    """A change from one layout of a mesh to another, in specs and sizes. Made by `Task.between`."""

    src: Layout
    sizes: Sizes
    start: Spec  # of src
    end: Spec  # to be reached before the `last` steps
    reduced: tuple[str, ...]  # axes to reduce on the way
    op: str  # their reduction
    whole: tuple[str, ...]  # axes of two or more ranks on which src replicates
    last: tuple[MakePartial, ...]  # final steps, which make axes Partial

    @classmethod
    def between(cls, src: Layout, dst: Layout, shape: tuple[int, ...], topology: Links | None) -> Task:
        """The task of going from `src` to `dst`, layouts of the same mesh."""
        sizes, start, end = sizes_of(src.mesh, shape, topology), spec_of(src, len(shape)), spec_of(dst, len(shape))
        triples = list(zip(src.mesh.axis_names, src.placements, dst.placements, strict=True))
        end, last = _with_partials(start, end, [(a, p, q) for a, p, q in triples if q != p and isinstance(q, Partial)])
        reduced = tuple(a for a, p, q in triples if isinstance(p, Partial) and not isinstance(q, Partial))
        op = next((p.op for p in src.placements if isinstance(p, Partial)), "sum")
        whole = tuple(a for a, p, _ in triples if isinstance(p, Replicate) and sizes.axes[a] > 1)
        return cls(src, sizes, start, end, reduced, op, whole, last)

    def floor(self) -> int:
        """Elements received by the busiest rank at least, if all sizes divide evenly; see `costs.py`."""
        need = self.sizes.local(self.end)
        if not self.reduced:
            return need - self.sizes.overlap(self.start, self.end)
        taking = {*moving(self.start, self.end), *self.reduced, *self.whole}
        ranks = self.sizes.parts(taking)
        copies = ranks // self.sizes.parts([axis for order in self.end for axis in order if axis in taking])
        return max(need, need * (self.sizes.parts(self.reduced) + copies - 2) // copies)

    def all_cut(self) -> bool:
        """Whether every axis taking part shards a dim at the end, and shards a dim or is reduced at the start.

        A ReduceExchange needs this.
        """
        start, end = cutting(self.start), cutting(self.end)
        taking = {*moving(self.start, self.end), *self.reduced}
        return taking <= end and taking <= start | set(self.reduced)


def _with_partials(
    start: Spec, end: Spec, partials: list[tuple[str, Placement, Placement]]
) -> tuple[Spec, tuple[MakePartial, ...]]:
    """The steps that make axes Partial at the end, and the spec before these steps.

    partials: (axis, source placement, Partial placement) of every such axis. A shard stays in place, as the minor axis
        of its dim. An average has no identity to put around a shard, so its axis replicates before.
    """
    steps: list[MakePartial] = []
    order = [axis for cut in start for axis in cut]
    for axis, before, after in sorted(partials, key=lambda item: order.index(item[0]) if item[0] in order else -1):
        assert isinstance(after, Partial), "made lists only axes that become Partial"
        if isinstance(before, Shard) and after.op != "avg":
            end = appended(end, [(axis, before.dim)])
            steps.insert(0, MakePartial(axis, after.op, before.dim))
        else:
            steps.append(MakePartial(axis, after.op))
    return end, tuple(steps)


@dataclass(frozen=True, slots=True)
class Ways:
    """All ways worth pricing, the simplest first."""

    task: Task
    moves: Moves

    def __iter__(self) -> Iterator[Way]:
        if self.task.reduced:
            yield from self._reducing()
        else:
            yield from self._sharded(self.task.start, self.task.end)

    def _sharded(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """Ways without a reduction: gathers alone, an exchange alone, or slices, an exchange and gathers."""
        if src == dst:
            yield []
            return
        yield from self._gathering(src, dst)
        yield [self.moves.exchange(src, dst)]
        if self.moves.thorough:
            for ahead, behind in self._around(src, dst):
                for gathers in self.moves.gathers(behind, dst):
                    middle = [] if ahead == behind else [self.moves.exchange(ahead, behind)]
                    yield self.moves.slices(src, ahead) + middle + gathers

    def _gathering(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """Slices, then gathers; only where in every dim the axes of one spec are the first axes of the other."""
        refined = []
        for a, b in zip(src, dst, strict=True):
            longer, shorter = (a, b) if len(a) > len(b) else (b, a)
            if longer[: len(shorter)] != shorter:
                return
            refined.append(longer)
        ahead = tuple(refined)
        if len(set().union(*ahead)) == sum(map(len, ahead)):  # no axis is both sliced and gathered
            for gathers in self.moves.gathers(ahead, dst):
                yield self.moves.slices(src, ahead) + gathers

    def _around(self, src: Spec, dst: Spec) -> Iterator[tuple[Spec, Spec]]:
        """Specs (ahead, behind) around an exchange: `src` is sliced into `ahead`, and `dst` is gathered from `behind`.

        An axis replicated in `dst` may shard a dim of `behind`, and be gathered last.
        """
        shardable = cutting(src) | {*self.task.whole}  # the other axes are still Partial
        idle = [axis for axis in self.task.sizes.axes if axis in shardable - cutting(dst)]
        options = [(None, *range(len(dst))) for _ in idle]
        for dims in product(*options):
            behind = appended(dst, zip(idle, dims, strict=True))
            free = [axis for axis in self.task.whole if axis in cutting(behind) - cutting(src)]
            for sliced in dict.fromkeys(((), tuple(free))):  # a dict, unlike a set, has the same order in every process
                where = [(axis, next(d for d, order in enumerate(behind) if axis in order)) for axis in sliced]
                ahead = appended(src, where)
                if behind != dst or ahead != src:
                    yield ahead, behind

    def _reducing(self) -> Iterator[Way]:
        """Ways with a reduction: reduce on the source's layout and then move, or move addends and then reduce.

        Or do both in a single ReduceExchange.
        """
        yield from self._reducing_last()
        for scattered, sliced in self._scatterings():
            for dims in product(*(self._dims(axis) for axis in (*sliced, *scattered))):
                where = dict(zip((*sliced, *scattered), dims, strict=True))
                ahead = appended(self.task.start, ((axis, where[axis]) for axis in sliced))
                reduced = self._reduced(ahead, {axis: where[axis] for axis in scattered})
                for moves_after in self._sharded(reduced[-1].after, self.task.end):
                    yield self.moves.slices(self.task.start, ahead) + reduced + moves_after
        if self.task.op == "sum" and self.task.all_cut():
            yield [self.moves.reduce_exchange(self.task.start, self.task.end)]

    def _reducing_last(self) -> Iterator[Way]:
        """Ways that move the addends along the sharded axes first, and then reduce.

        Only where the reduced axes are minor to all other axes of their dims at the end.
        """
        scattered = {}
        before = []
        for dim, order in enumerate(self.task.end):
            unreduced = tuple(axis for axis in order if axis not in self.task.reduced)
            if order[: len(unreduced)] != unreduced:
                return
            scattered.update(dict.fromkeys(order[len(unreduced) :], dim))
            before.append(unreduced)
        for first in self._sharded(self.task.start, tuple(before)):
            reduced = self._reduced(tuple(before), scattered)
            yield first + reduced

    def _scatterings(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Pairs of axes: reduced axes to scatter, and replicated axes to slice before.

        The remaining reduced axes are all-reduced.
        """
        at_end = tuple(
            axis for axis in self._in_end_order(self.task.whole) if any(axis in order for order in self.task.end)
        )
        wanted = tuple(
            axis for axis in self._in_end_order(self.task.reduced) if any(axis in order for order in self.task.end)
        )
        scattered = [wanted] if len(wanted) < len(self.task.reduced) else []
        for names in (*scattered, self._in_end_order(self.task.reduced)):
            for sliced in dict.fromkeys(((), at_end, self._in_end_order(self.task.whole))):
                yield names, sliced
        yield (), ()

    def _in_end_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes in the order of the end spec; axes missing there come last."""
        order = [axis for cut in self.task.end for axis in cut]
        return tuple(sorted(axes, key=lambda axis: order.index(axis) if axis in order else len(order)))

    def _dims(self, axis: str) -> list[int]:
        """The dims to scatter or slice `axis` over: the dim sharded by the axis at the end, where there is one.

        Otherwise all dims, or only the first if the search is not thorough. Evenly divisible dims come first, then
        dims that can be gathered to the end spec, then larger dims.
        """
        for dim, order in enumerate(self.task.end):
            if axis in order:
                return [dim]
        ranked = sorted(
            range(len(self.task.end)),
            key=lambda dim: (
                self.task.sizes.extent(dim, self.task.start[dim]) % self.task.sizes.axes[axis] != 0,
                self.task.end[dim] != self.task.start[dim][: len(self.task.end[dim])],
                -self.task.sizes.extent(dim, self.task.start[dim]),
            ),
        )
        return ranked if self.moves.thorough else ranked[:1]

    def _reduced(self, spec: Spec, scattered: Mapping[str, int]) -> Way:
        """The moves that reduce all reduced axes. scattered: axis -> dim; the rest are all-reduced."""
        return self.moves.reduce(spec, scattered, tuple(a for a in self.task.reduced if a not in scattered))
