"""The cheapest way from one layout of a mesh to another.

Ways are tried in the order of Rink et al. (2022), "Memory-efficient array redistribution through portable collective
communication": local slices, reductions, one exchange, gathers. Between layouts of {Replicate, Shard} the exchange of
what each rank needs and lacks reaches the lower bound alone, and where a gather does as well the gather is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, permutations, product
from typing import NamedTuple

from weft.mesh import Layout, Partial, Placement, Replicate, Shard

from .links import Links
from .pricing import Spec, Traffic, moving, sizes_of, spec_of, total
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Permute,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
)

Fits = Callable[[tuple[Step, ...]], bool]
WAYS = 256  # tried at most, with a topology or a memory limit: at 60 us each, measured on one CPU core


class Move(NamedTuple):
    """A step before it has layouts: `kind` of step, the axes it changes, their dims, and the spec after it."""

    kind: type[Step]
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    before: Spec
    after: Spec
    traffic: Traffic
    apart: tuple[str, ...]


Way = list[Move]


def cheapest(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    *,
    itemsize: int = 1,
    topology: Links | None = None,
    fits: Fits | None = None,
) -> tuple[Step, ...] | None:
    """Steps from `src` to `dst`, layouts of one mesh; None where `fits` takes none of those found.

    Without a topology: the fewest elements received by the busiest rank, then the fewest transfers; with one: the
    fewest seconds for elements of `itemsize` bytes. The layouts have passed `layouts.check_reductions`.
    """
    return _Search(src, dst, tuple(shape), itemsize, topology).best(fits)


class _Search:
    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, topology: Links | None) -> None:
        self.src, self.itemsize, self.topology = src, itemsize, topology
        self.sizes = sizes_of(src.mesh, shape, topology)
        self.start, self.end = spec_of(src, len(shape)), spec_of(dst, len(shape))
        pairs = list(zip(src.mesh.axis_names, src.placements, dst.placements, strict=True))
        self.reduced = tuple(a for a, p, q in pairs if isinstance(p, Partial) and not isinstance(q, Partial))
        self.op = next((p.op for p in src.placements if isinstance(p, Partial)), "sum")
        self.last = self._made_partial([(a, p, q) for a, p, q in pairs if q != p and isinstance(q, Partial)])
        self.whole = tuple(a for a, p, _ in pairs if isinstance(p, Replicate) and self.sizes.axes[a] > 1)
        self.thorough = False

    def best(self, fits: Fits | None) -> tuple[Step, ...] | None:
        """The cheapest way; with `fits`, the cheapest of those it takes."""
        if fits is None and self.topology is None:
            floor, found = self._floor(), None
            for way in self.ways():
                key = self._key(way)
                if found is None or key < found[0]:
                    found = (key, way)
                if key[0] <= floor and key[1] <= 1:
                    break
            assert found is not None, "there is always an exchange, or a reduction and an exchange"
            return self.steps(found[1])
        self.thorough = True
        for way in sorted(islice(self.ways(), WAYS), key=self._key):
            steps = self.steps(way)
            if fits is None or fits(steps):
                return steps
        return None

    def _key(self, way: Way) -> tuple[float, ...]:
        elements = sum(total(move.traffic) for move in way)
        transfers = sum(bool(move.traffic) for move in way)
        order = (elements, transfers, len(way))
        return order if self.topology is None else (sum(map(self._seconds, way)), *order)

    def _seconds(self, move: Move) -> float:
        assert self.topology is not None, "seconds are asked for where there is a topology"
        return self.topology.seconds(
            {axis: (n, elements * self.itemsize) for axis, (n, elements) in move.traffic.items()}
        )

    # Ways

    def ways(self) -> Iterator[Way]:
        """Every way worth pricing, the simplest first."""
        if self.reduced:
            yield from self._reducing()
        else:
            yield from self._sharded(self.start, self.end)

    def _sharded(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """Without anything to reduce: gather alone, exchange alone, or slices, an exchange and gathers."""
        if src == dst:
            yield []
            return
        yield from self._gathering(src, dst)
        yield [self._exchange(src, dst)]
        if self.thorough:
            for ahead, behind in self._around(src, dst):
                for gathers in self._gathers(behind, dst):
                    middle = [] if ahead == behind else [self._exchange(ahead, behind)]
                    yield self._slices(src, ahead) + middle + gathers

    def _gathering(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """Slices, then a gather, where in every dim the one order begins the other."""
        refined = []
        for a, b in zip(src, dst, strict=True):
            longer, shorter = (a, b) if len(a) > len(b) else (b, a)
            if longer[: len(shorter)] != shorter:
                return
            refined.append(longer)
        ahead = tuple(refined)
        if len(set().union(*ahead)) == sum(map(len, ahead)):  # an axis cuts one dim: it is not both gathered and sliced
            for gathers in self._gathers(ahead, dst):
                yield self._slices(src, ahead) + gathers

    def _around(self, src: Spec, dst: Spec) -> Iterator[tuple[Spec, Spec]]:
        """Specs to slice `src` into, and to gather `dst` from: an axis that `dst` leaves whole may be gathered last."""
        shardable = _cutting(src) | {*self.whole}  # others are Partial still
        idle = [axis for axis in self.sizes.axes if axis in shardable - _cutting(dst)]
        options = [(None, *range(len(dst))) for _ in idle]
        for dims in product(*options):
            behind = _appended(dst, zip(idle, dims, strict=True))
            free = [axis for axis in self.whole if axis in _cutting(behind) - _cutting(src)]
            for sliced in {(), tuple(free)}:
                where = [(axis, next(d for d, order in enumerate(behind) if axis in order)) for axis in sliced]
                ahead = _appended(src, where)
                if behind != dst or ahead != src:
                    yield ahead, behind

    def _reducing(self) -> Iterator[Way]:
        """Reduce where the tensor is, and move on; or move the addends, and reduce where it goes."""
        yield from self._reducing_last()
        for scattered, sliced in self._scatterings():
            for dims in product(*(self._dims(axis) for axis in (*sliced, *scattered))):
                where = dict(zip((*sliced, *scattered), dims, strict=True))
                ahead = _appended(self.start, ((axis, where[axis]) for axis in sliced))
                reduced = self._reduce(ahead, {axis: where[axis] for axis in scattered})
                for rest in self._sharded(reduced[-1].after, self.end):
                    yield self._slices(self.start, ahead) + reduced + rest
        if self.op == "sum" and self._all_cut():
            yield [self._move(ReduceExchange, self.start, self.end)]

    def _reducing_last(self) -> Iterator[Way]:
        """The moves of the sharded axes first, of addends; then the reduction, where its shards end their dims."""
        scattered = {}
        before = []
        for dim, order in enumerate(self.end):
            kept = tuple(axis for axis in order if axis not in self.reduced)
            if order[: len(kept)] != kept:
                return
            scattered.update(dict.fromkeys(order[len(kept) :], dim))
            before.append(kept)
        for first in self._sharded(self.start, tuple(before)):
            reduced = self._reduce(tuple(before), scattered)
            yield first + reduced

    def _scatterings(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Which reduced axes are scattered (the others are all-reduced), and which whole axes are sliced before."""
        at_end = tuple(axis for axis in self._in_end_order(self.whole) if any(axis in order for order in self.end))
        wanted = tuple(axis for axis in self._in_end_order(self.reduced) if any(axis in order for order in self.end))
        scattered = [wanted] if len(wanted) < len(self.reduced) else []
        for names in (*scattered, self._in_end_order(self.reduced)):
            for sliced in dict.fromkeys(((), at_end, self._in_end_order(self.whole))):
                yield names, sliced
        yield (), ()

    def _in_end_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        order = [axis for cut in self.end for axis in cut]
        return tuple(sorted(axes, key=lambda axis: order.index(axis) if axis in order else len(order)))

    def _dims(self, axis: str) -> list[int]:
        """Dims to scatter or slice an axis over: the one it shards at the end, else those that divide best."""
        for dim, order in enumerate(self.end):
            if axis in order:
                return [dim]
        ranked = sorted(
            range(len(self.end)),
            key=lambda dim: (
                self.sizes.extent(dim, self.start[dim]) % self.sizes.axes[axis] != 0,
                self.end[dim] != self.start[dim][: len(self.end[dim])],
                -self.sizes.extent(dim, self.start[dim]),
            ),
        )
        return ranked if self.thorough else ranked[:1]

    # Moves

    def _slices(self, src: Spec, dst: Spec) -> Way:
        way = []
        for dim, (a, b) in enumerate(zip(src, dst, strict=True)):
            for axis in b[len(a) :]:
                way.append(self._move(Slice, src, _appended(src, [(axis, dim)]), (axis,), (dim,)))
                src = way[-1].after
        return way

    def _gathers(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """All in one collective where shards divide evenly, and axis by axis, minor first, where they do not."""
        cut = [(axis, dim) for dim, (a, b) in enumerate(zip(src, dst, strict=True)) for axis in a[len(b) :]]
        if not cut:
            yield []
            return
        axes, dims = tuple(axis for axis, _ in cut), tuple(dim for _, dim in cut)
        if self._in_one(src, dst, dims):
            yield [self._move(AllGather, src, dst, axes, dims)]
            if self.thorough and len(axes) > 1:
                for order in _orders(axes):
                    yield [self._move(AllGather, src, dst, axes, dims, order)]
        if len(axes) > 1 and (self.thorough or len(set(dims)) < len(dims)):
            way = []
            for axis, dim in reversed(cut):
                after = tuple(order[:-1] if d == dim else order for d, order in enumerate(src))
                way.append(self._move(AllGather, src, after, (axis,), (dim,)))
                src = after
            yield way

    def _in_one(self, finer: Spec, coarser: Spec, dims: tuple[int, ...]) -> bool:
        """Whether one collective may gather or scatter these dims: parts of one size, or one axis to each dim."""
        return len(set(dims)) == len(dims) or all(self._divides(finer, coarser, dim) for dim in dims)

    def _divides(self, finer: Spec, coarser: Spec, dim: int) -> bool:
        extra = finer[dim][len(coarser[dim]) :]
        return self.sizes.extent(dim, coarser[dim]) % self.sizes.parts(extra) == 0 and self.sizes.even(coarser)

    def _exchange(self, src: Spec, dst: Spec) -> Move:
        changed = [dim for dim, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]
        if len(changed) == 2:
            for out, into in (changed, changed[::-1]):
                axis = src[out][-1:]
                if axis and src[out][:-1] == dst[out] and dst[into] == src[into] + axis:
                    return self._move(AllToAll, src, dst, axis, (out, into))
        parts = all(self.sizes.parts(a) == self.sizes.parts(b) for a, b in zip(src, dst, strict=True))
        one_to_one = parts and self.sizes.even(src) and moving(src, dst) <= _cutting(src) & _cutting(dst)
        return self._move(Permute if one_to_one else Exchange, src, dst)

    def _reduce(self, spec: Spec, scattered: dict[str, int]) -> Way:
        """A reduce-scatter over `scattered`, then an all-reduce of what is left over the other reduced axes."""
        way: Way = []
        axes, dims = tuple(scattered), tuple(scattered.values())
        after = _appended(spec, scattered.items())
        if axes and self._in_one(after, spec, dims):
            fast_first = tuple(axis for axis in reversed(self.sizes.slow_first) if axis in axes)
            apart = fast_first if self.topology is not None and len(axes) > 1 else ()
            way.append(self._move(ReduceScatter, spec, after, axes, dims, apart))
        else:
            for axis, dim in scattered.items():
                after = _appended(spec, [(axis, dim)])
                way.append(self._move(ReduceScatter, spec, after, (axis,), (dim,)))
                spec = after
        if rest := tuple(axis for axis in self.reduced if axis not in scattered):
            way.append(self._move(AllReduce, after, after, rest))
        return way

    def _move(
        self,
        kind: type[Step],
        src: Spec,
        dst: Spec,
        axes: tuple[str, ...] = (),
        dims: tuple[int, ...] = (),
        apart: tuple[str, ...] = (),
    ) -> Move:
        return Move(kind, axes, dims, src, dst, self.sizes.traffic(kind, axes, src, dst, apart), apart)

    def _made_partial(self, made: list[tuple[str, Placement, Placement]]) -> list[Step]:
        """The steps that make axes Partial at the end; the spec they start from takes the place of the target's.

        A shard is left where it is, as the minor one of its dim. An average has no identity to put around it.
        """
        steps: list[Step] = []
        order = [axis for cut in self.start for axis in cut]
        for axis, before, after in sorted(made, key=lambda item: order.index(item[0]) if item[0] in order else -1):
            assert isinstance(after, Partial), "only axes that become Partial are made so"
            if isinstance(before, Shard) and after.op != "avg":
                self.end = _appended(self.end, [(axis, before.dim)])
                steps.insert(0, MakePartial(axis, after.op, before.dim))
            else:
                steps.append(MakePartial(axis, after.op))
        return steps

    def _all_cut(self) -> bool:
        """Whether every axis that takes part shards something in the end, and does or is to be reduced in the source."""
        start, end = _cutting(self.start), _cutting(self.end)
        taking = {*moving(self.start, self.end), *self.reduced}
        return taking <= end and taking <= start | set(self.reduced)

    def _floor(self) -> int:
        """Elements that the busiest rank receives whatever the way, if all divides evenly; see `bounds.py`."""
        need = self.sizes.local(self.end)
        if not self.reduced:
            return need - self.sizes.overlap(self.start, self.end)
        taking = {*moving(self.start, self.end), *self.reduced, *self.whole}
        ranks = self.sizes.parts(taking)
        copies = ranks // self.sizes.parts([axis for order in self.end for axis in order if axis in taking])
        return max(need, need * (self.sizes.parts(self.reduced) + copies - 2) // copies)

    # Steps

    def steps(self, way: Way) -> tuple[Step, ...]:
        """The way with the layouts that its steps need."""
        mesh, waiting = self.src.mesh, set(self.reduced)
        passing = {axis: self.src[axis] for axis in mesh.axis_names if isinstance(self.src[axis], Partial)}
        steps: list[Step] = []
        for move in way:
            axis: str | tuple[str, ...] = move.axes if len(move.axes) != 1 else move.axes[0]
            dim: int | tuple[int, ...] = move.dims if len(move.dims) != 1 else move.dims[0]
            if move.kind is AllGather:
                steps.append(AllGather(axis, dim, move.apart))
            elif move.kind is ReduceScatter:
                waiting -= set(move.axes)
                steps.append(ReduceScatter(axis, dim, self.op, move.apart))
            elif move.kind is AllReduce:
                waiting -= set(move.axes)
                steps.append(AllReduce(axis, self.op))
            elif move.kind is Slice:
                steps.append(Slice(move.axes[0], move.dims[0]))
            elif move.kind is AllToAll:
                steps.append(AllToAll(move.axes[0], *move.dims))
            else:
                if move.kind is ReduceExchange:
                    waiting.clear()
                partial = {a: p for a, p in passing.items() if a in waiting or a not in self.reduced}
                cut = {a: Shard(d) for d, order in enumerate(move.after) for a in order}
                steps.append(move.kind(Layout.in_order(mesh, cut | partial)))  # type: ignore[call-arg, arg-type]
        return (*steps, *self.last)


def _appended(spec: Spec, where: Iterable[tuple[str, int | None]] | Iterable[tuple[str, int]]) -> Spec:
    orders = [list(order) for order in spec]
    for axis, dim in where:
        if dim is not None and axis not in orders[dim]:
            orders[dim].append(axis)
    return tuple(tuple(order) for order in orders)


def _cutting(spec: Spec) -> set[str]:
    return {axis for order in spec for axis in order}


def _orders(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return permutations(axes) if len(axes) <= 3 else iter((axes, axes[::-1]))
