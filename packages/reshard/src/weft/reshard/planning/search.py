"""Search for the cheapest steps between two layouts of a mesh.

A `ShardSpec` lists for each dim the axes sharding the dim, major first. `SearchTask` states a search: the spec to start
from, the spec to reach, and the axes to reduce in between. `Candidates` lists the ways to try, each a list of moves
(moves.py). `cheapest` prices the ways, and turns the best way into steps.

Most ways have the order of Rink et al. (2022), "Memory-efficient array redistribution through portable collective
communication": local slices, reductions, an exchange, gathers. Some ways move the addends first, and reduce last.
Between layouts of Replicate and Shard, a single exchange of the elements needed and lacked by each rank attains the
lower bound on the elements received by the busiest rank. Ways of gathers are listed before the exchange: where gathers
attain the bound, too, gathers are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from weft.mesh import Layout, Partial, Placement, Replicate, Shard

from .layouts import ShardSpec, append_axes, moved_axes, sharding_axes, spec_of
from .moves import Links, Move, MoveBuilder, Sizes, Way, sizes_of, total
from .steps import AllGather, AllReduce, AllToAll, MakePartial, ReduceExchange, ReduceScatter, Slice, Step

Fits = Callable[[tuple[Step, ...]], bool]
MOST_PRICED = 256  # the most ways priced with a topology or a memory limit; 60 us each, measured on one CPU core


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

    topology: with it, the steps take the fewest seconds for elements of `itemsize` bytes. Without, the busiest rank
        receives the fewest elements, and among equals the steps that communicate are the fewest.
    fits: whether steps are acceptable, as within a memory limit; by default all are.
    The layouts must have passed `layouts.check_reductions`.
    """
    task = SearchTask.between(src, dst, tuple(shape), topology)
    if fits is None and topology is None:
        return _steps(_of_fewest_elements(task), task)

    def key(way: Way) -> tuple[float, ...]:
        seconds = () if topology is None else (sum(_seconds(move, itemsize, topology) for move in way),)
        return (*seconds, *_elements_and_transfers(way))

    # See `MoveBuilder`. thorough: gathers in several forms and orders, and more ways. apart: a reduction over several
    # axes by a collective per axis.
    ways = Candidates(task, MoveBuilder(task.sizes, thorough=True, apart=topology is not None))
    for way in sorted(islice(ways, MOST_PRICED), key=key):
        steps = _steps(way, task)
        if fits is None or fits(steps):
            return steps
    return None


def _of_fewest_elements(task: SearchTask) -> Way:
    """The way with the fewest elements received by the busiest rank, then the fewest moves with traffic."""
    bound, best = task.least_received(), None
    for way in Candidates(task, MoveBuilder(task.sizes, thorough=False, apart=False)):
        key = _elements_and_transfers(way)
        if best is None or key < best[0]:
            best = (key, way)
        if key[0] <= bound and key[1] <= 1:
            break
    assert best is not None, "there is always an exchange, or a reduction and an exchange"
    return best[1]


def _elements_and_transfers(way: Way) -> tuple[int, int, int]:
    """The key to compare ways by: elements received by the busiest rank, moves with traffic, moves."""
    return sum(total(move.traffic) for move in way), sum(bool(move.traffic) for move in way), len(way)


def _seconds(move: Move, itemsize: int, topology: Links) -> float:
    """Predicted time of a move, for elements of `itemsize` bytes."""
    return topology.seconds({axis: (n, elements * itemsize) for axis, (n, elements) in move.traffic.items()})


def _steps(way: Way, task: SearchTask) -> tuple[Step, ...]:
    """The steps of a way, with their layouts."""
    mesh, unreduced = task.src.mesh, set(task.to_reduce)
    src_partials = {axis: task.src[axis] for axis in mesh.axis_names if isinstance(task.src[axis], Partial)}
    steps: list[Step] = []
    for move in way:
        axis: str | tuple[str, ...] = move.axes if len(move.axes) != 1 else move.axes[0]
        dim: int | tuple[int, ...] = move.dims if len(move.dims) != 1 else move.dims[0]
        if move.kind is AllGather:
            steps.append(AllGather(axis, dim, move.apart))  # apart: the axes with a collective each; see `Move`
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
            partial = {a: p for a, p in src_partials.items() if a in unreduced or a not in task.to_reduce}
            cut = {a: Shard(d) for d, order in enumerate(move.after) for a in order}
            steps.append(move.kind(Layout.in_order(mesh, cut | partial)))  # type: ignore[call-arg, arg-type]
    return (*steps, *task.final_steps)


@dataclass(frozen=True, slots=True)
class SearchTask:
    """A change between two layouts of a mesh, in specs and sizes. Made by `SearchTask.between`."""

    src: Layout
    sizes: Sizes
    start: ShardSpec  # the spec of `src`
    end: ShardSpec  # the spec to reach, before the final steps
    to_reduce: tuple[str, ...]  # axes that are Partial in `src` and not at the end
    op: str  # the op of the Partial axes, as "sum"
    replicated: tuple[str, ...]  # axes of two or more ranks on which `src` replicates
    final_steps: tuple[MakePartial, ...]  # local steps that make axes Partial, after the search's moves

    @classmethod
    def between(cls, src: Layout, dst: Layout, shape: tuple[int, ...], topology: Links | None) -> SearchTask:
        """The task of going from `src` to `dst`, layouts of the same mesh."""
        sizes, start, end = sizes_of(src.mesh, shape, topology), spec_of(src, len(shape)), spec_of(dst, len(shape))
        triples = list(zip(src.mesh.axis_names, src.placements, dst.placements, strict=True))
        to_partial = [(a, p, q) for a, p, q in triples if q != p and isinstance(q, Partial)]
        end, final_steps = _with_partials(start, end, to_partial)
        to_reduce = tuple(a for a, p, q in triples if isinstance(p, Partial) and not isinstance(q, Partial))
        op = next((p.op for p in src.placements if isinstance(p, Partial)), "sum")
        replicated = tuple(a for a, p, _ in triples if isinstance(p, Replicate) and sizes.axes[a] > 1)
        return cls(src, sizes, start, end, to_reduce, op, replicated, final_steps)

    def least_received(self) -> int:
        """A lower bound on the elements received by the busiest rank, where all sizes divide evenly; see `costs.py`.

        Without a reduction, the bound is the number of elements needed by the rank and not held.

        With a reduction, consider the sub-mesh along all axes which may move data, of R ranks. At the end each rank
        needs `needed` elements, and each element is on `copies` ranks: R * needed / copies different elements. Each of
        these takes p - 1 messages to add the addends of the p ranks along the axes to reduce, and copies - 1 messages
        to hand on the sum. The busiest of the R ranks receives at least the average. The bound is at least `needed`: no
        rank holds an element of the sum at the start.
        """
        needed = self.sizes.local(self.end)
        if not self.to_reduce:
            return needed - self.sizes.overlap(self.start, self.end)
        axes = {*moved_axes(self.start, self.end), *self.to_reduce, *self.replicated}
        copies = self.sizes.parts(axes) // self.sizes.parts(sharding_axes(self.end) & axes)
        return max(needed, needed * (self.sizes.parts(self.to_reduce) + copies - 2) // copies)

    def can_reduce_exchange(self) -> bool:
        """Whether a single ReduceExchange can do the task.

        For this, each axis which moves data or is reduced must shard a dim at the end; at the start the axis must
        shard a dim or be Partial.
        """
        start, end = sharding_axes(self.start), sharding_axes(self.end)
        axes = {*moved_axes(self.start, self.end), *self.to_reduce}
        return axes <= end and axes <= start | set(self.to_reduce)


def _with_partials(
    start: ShardSpec, end: ShardSpec, partials: Sequence[tuple[str, Placement, Partial]]
) -> tuple[ShardSpec, tuple[MakePartial, ...]]:
    """The spec which the search has to reach, and the MakePartial steps afterwards.

    end: the target's spec. partials: (axis, placement in the source, Partial) of every axis which becomes Partial.
    An axis sharding a dim keeps the shard until the MakePartial, as the minor axis of the dim: MakePartial surrounds
    the shard with the op's identity. An average has no identity: before MakePartial(op="avg") the axis replicates.
    """
    steps: list[MakePartial] = []
    order = [axis for cut in start for axis in cut]
    for axis, before, after in sorted(partials, key=lambda item: order.index(item[0]) if item[0] in order else -1):
        if isinstance(before, Shard) and after.op != "avg":
            end = append_axes(end, [(axis, before.dim)])
            steps.insert(0, MakePartial(axis, after.op, before.dim))
        else:
            steps.append(MakePartial(axis, after.op))
    return end, tuple(steps)


@dataclass(frozen=True, slots=True)
class Candidates:
    """All ways worth pricing for a task. Of equally cheap ways, `cheapest` takes the first."""

    task: SearchTask
    moves: MoveBuilder

    def __iter__(self) -> Iterator[Way]:
        if self.task.to_reduce:
            yield from self._ways_with_reduction()
        else:
            yield from self._ways_between(self.task.start, self.task.end)

    def _ways_between(self, src: ShardSpec, dst: ShardSpec) -> Iterator[Way]:
        """Ways without a reduction: slices and gathers, an exchange alone, or slices, an exchange and gathers."""
        if src == dst:
            yield []
            return
        yield from self._slices_and_gathers(src, dst)
        yield [self.moves.exchange(src, dst)]
        if self.moves.thorough:
            for before, after in self._specs_around_exchange(src, dst):
                for gathers in self.moves.gathers(after, dst):
                    exchange = [] if before == after else [self.moves.exchange(before, after)]
                    yield self.moves.slices(src, before) + exchange + gathers

    def _slices_and_gathers(self, src: ShardSpec, dst: ShardSpec) -> Iterator[Way]:
        """Slices, then gathers; only where in every dim the longer of the two lists of axes begins with the shorter."""
        longest = []
        for a, b in zip(src, dst, strict=True):
            longer, shorter = (a, b) if len(a) > len(b) else (b, a)
            if longer[: len(shorter)] != shorter:
                return
            longest.append(longer)
        sliced = tuple(longest)
        if len(set().union(*sliced)) == sum(map(len, sliced)):  # no axis is both sliced and gathered
            for gathers in self.moves.gathers(sliced, dst):
                yield self.moves.slices(src, sliced) + gathers

    def _specs_around_exchange(self, src: ShardSpec, dst: ShardSpec) -> Iterator[tuple[ShardSpec, ShardSpec]]:
        """Pairs of specs, before and after an exchange.

        Slices lead from `src` to the first spec, gathers from the second spec to `dst`.
        An axis replicated in `dst` may shard a dim after the exchange, and be gathered last.
        """
        shardable = sharding_axes(src) | {*self.task.replicated}  # the other axes are Partial at this point
        gatherable = [axis for axis in self.task.sizes.axes if axis in shardable - sharding_axes(dst)]
        options = [(None, *range(len(dst))) for _ in gatherable]
        for dims in product(*options):
            after = append_axes(dst, zip(gatherable, dims, strict=True))
            sliceable = [axis for axis in self.task.replicated if axis in sharding_axes(after) - sharding_axes(src)]
            # A dict, unlike a set, has the same order in every process.
            for sliced in dict.fromkeys(((), tuple(sliceable))):
                dim_of = [(axis, next(d for d, order in enumerate(after) if axis in order)) for axis in sliced]
                before = append_axes(src, dim_of)
                if after != dst or before != src:
                    yield before, after

    def _ways_with_reduction(self) -> Iterator[Way]:
        """Ways with a reduction: move addends and then reduce; reduce and then move; or a single ReduceExchange."""
        yield from self._ways_that_reduce_last()
        for scattered, sliced in self._scattered_and_sliced():
            for dims in product(*(self._dims(axis) for axis in (*sliced, *scattered))):
                dim_of = dict(zip((*sliced, *scattered), dims, strict=True))
                before = append_axes(self.task.start, ((axis, dim_of[axis]) for axis in sliced))
                reductions = self._reductions(before, {axis: dim_of[axis] for axis in scattered})
                for moves_after in self._ways_between(reductions[-1].after, self.task.end):
                    yield self.moves.slices(self.task.start, before) + reductions + moves_after
        if self.task.op == "sum" and self.task.can_reduce_exchange():
            yield [self.moves.reduce_exchange(self.task.start, self.task.end)]

    def _ways_that_reduce_last(self) -> Iterator[Way]:
        """Ways which move the addends along the sharded axes first, and then reduce.

        Only where, in each dim at the end, the axes to reduce are minor to all remaining axes.
        """
        scattered = {}
        before = []
        for dim, order in enumerate(self.task.end):
            moved = tuple(axis for axis in order if axis not in self.task.to_reduce)
            if order[: len(moved)] != moved:
                return
            scattered.update(dict.fromkeys(order[len(moved) :], dim))
            before.append(moved)
        for moves_before in self._ways_between(self.task.start, tuple(before)):
            yield moves_before + self._reductions(tuple(before), scattered)

    def _scattered_and_sliced(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Pairs: which of the axes to reduce are reduce-scattered, and which replicated axes are sliced before the
        reduction.

        The remaining axes to reduce are all-reduced.
        """
        at_end = sharding_axes(self.task.end)
        to_reduce, replicated = self._in_end_order(self.task.to_reduce), self._in_end_order(self.task.replicated)
        scattered_at_end = tuple(axis for axis in to_reduce if axis in at_end)
        sliced_at_end = tuple(axis for axis in replicated if axis in at_end)
        fewer = [scattered_at_end] if len(scattered_at_end) < len(to_reduce) else []
        for scattered in (*fewer, to_reduce):
            for sliced in dict.fromkeys(((), sliced_at_end, replicated)):
                yield scattered, sliced
        yield (), ()

    def _in_end_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes in the order of the end spec; axes missing there come last."""
        order = [axis for cut in self.task.end for axis in cut]
        return tuple(sorted(axes, key=lambda axis: order.index(axis) if axis in order else len(order)))

    def _dims(self, axis: str) -> list[int]:
        """The dims to scatter or slice `axis` over: the dim sharded by the axis at the end, where there is one.

        Otherwise all dims, or only the best if the search is not thorough. Dims divisible by the axis's size are better
        than the rest; among equals, dims from which a gather leads to the end spec; among these, larger dims.
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

    def _reductions(self, spec: ShardSpec, scattered: Mapping[str, int]) -> Way:
        """The moves which reduce all axes to reduce. scattered: axis -> dim; the remaining axes are all-reduced."""
        return self.moves.reduce(spec, scattered, tuple(a for a in self.task.to_reduce if a not in scattered))
