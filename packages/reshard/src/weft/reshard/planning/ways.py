"""Ways from one layout of a mesh to another: lists of moves, which the search prices.

Moves have the order of Rink et al. (2022), "Memory-efficient array redistribution through portable collective
communication": local slices, reductions, an exchange, gathers. Between layouts of Replicate and Shard, an exchange of
the elements needed and lacked by each rank attains the lower bound alone. Gathers come first, and are taken where they
attain the bound, too.
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
