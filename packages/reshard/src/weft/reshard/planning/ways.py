"""The ways from one layout of a mesh to another.

In the order of Rink et al. (2022), "Memory-efficient array redistribution through portable collective communication":
local slices, reductions, one exchange, gathers. Between layouts of {Replicate, Shard} the exchange of what each rank
needs and lacks reaches the lower bound alone, and where a gather does as well the gather is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from .moves import Moves, Way
from .spec import Spec, appended, cutting
from .task import Task


@dataclass(frozen=True, slots=True)
class Ways:
    """Every way worth pricing, the simplest first."""

    task: Task
    moves: Moves

    def __iter__(self) -> Iterator[Way]:
        if self.task.reduced:
            yield from self._reducing()
        else:
            yield from self._sharded(self.task.start, self.task.end)

    def _sharded(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """Without anything to reduce: gather alone, exchange alone, or slices, an exchange and gathers."""
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
        """Slices, then a gather, where in every dim the one order begins the other."""
        refined = []
        for a, b in zip(src, dst, strict=True):
            longer, shorter = (a, b) if len(a) > len(b) else (b, a)
            if longer[: len(shorter)] != shorter:
                return
            refined.append(longer)
        ahead = tuple(refined)
        if len(set().union(*ahead)) == sum(map(len, ahead)):  # an axis cuts one dim: it is not both gathered and sliced
            for gathers in self.moves.gathers(ahead, dst):
                yield self.moves.slices(src, ahead) + gathers

    def _around(self, src: Spec, dst: Spec) -> Iterator[tuple[Spec, Spec]]:
        """Specs to slice `src` into, and to gather `dst` from: an axis that `dst` leaves whole may be gathered last."""
        shardable = cutting(src) | {*self.task.whole}  # others are Partial still
        idle = [axis for axis in self.task.sizes.axes if axis in shardable - cutting(dst)]
        options = [(None, *range(len(dst))) for _ in idle]
        for dims in product(*options):
            behind = appended(dst, zip(idle, dims, strict=True))
            free = [axis for axis in self.task.whole if axis in cutting(behind) - cutting(src)]
            for sliced in dict.fromkeys(((), tuple(free))):  # in one order in every process
                where = [(axis, next(d for d, order in enumerate(behind) if axis in order)) for axis in sliced]
                ahead = appended(src, where)
                if behind != dst or ahead != src:
                    yield ahead, behind

    def _reducing(self) -> Iterator[Way]:
        """Reduce where the tensor is, and move on; or move the addends, and reduce where it goes."""
        yield from self._reducing_last()
        for scattered, sliced in self._scatterings():
            for dims in product(*(self._dims(axis) for axis in (*sliced, *scattered))):
                where = dict(zip((*sliced, *scattered), dims, strict=True))
                ahead = appended(self.task.start, ((axis, where[axis]) for axis in sliced))
                reduced = self._reduced(ahead, {axis: where[axis] for axis in scattered})
                for rest in self._sharded(reduced[-1].after, self.task.end):
                    yield self.moves.slices(self.task.start, ahead) + reduced + rest
        if self.task.op == "sum" and self.task.all_cut():
            yield [self.moves.reduce_exchange(self.task.start, self.task.end)]

    def _reducing_last(self) -> Iterator[Way]:
        """The moves of the sharded axes first, of addends; then the reduction, where its shards end their dims."""
        scattered = {}
        before = []
        for dim, order in enumerate(self.task.end):
            kept = tuple(axis for axis in order if axis not in self.task.reduced)
            if order[: len(kept)] != kept:
                return
            scattered.update(dict.fromkeys(order[len(kept) :], dim))
            before.append(kept)
        for first in self._sharded(self.task.start, tuple(before)):
            reduced = self._reduced(tuple(before), scattered)
            yield first + reduced

    def _scatterings(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Which reduced axes are scattered (the others are all-reduced), and which whole axes are sliced before."""
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
        order = [axis for cut in self.task.end for axis in cut]
        return tuple(sorted(axes, key=lambda axis: order.index(axis) if axis in order else len(order)))

    def _dims(self, axis: str) -> list[int]:
        """Dims to scatter or slice an axis over: the one it shards at the end, else those that divide best."""
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
        return self.moves.reduce(spec, scattered, tuple(a for a in self.task.reduced if a not in scattered))
