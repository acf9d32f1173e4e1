"""Moves: single steps between specs, with their traffic. Ways, which the search compares, are lists of moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from .pricing import Sizes, Traffic
from .spec import Spec, appended, cutting, moving
from .steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceExchange, ReduceScatter, Slice, Step


class Move(NamedTuple):
    """A step between two specs, not yet with layouts."""

    kind: type[Step]  # class of the step
    axes: tuple[str, ...]  # axes changed by the step; empty for a step with a target
    dims: tuple[int, ...]  # the dims of these axes; for AllToAll, the dims before and after
    after: Spec  # spec after the step
    traffic: Traffic
    apart: tuple[str, ...]  # order of collectives per axis; empty for a single collective


Way = list[Move]


@dataclass(frozen=True, slots=True)
class Moves:
    """Makes the moves between specs of a tensor, for `Ways`."""

    sizes: Sizes
    thorough: bool  # try gathers over several axes both in a single collective and in one per axis, in several orders
    apart: bool  # reduce over several axes by a collective per axis, the fastest axis first

    def slices(self, src: Spec, dst: Spec) -> Way:
        """Slices for all axes that shard a dim in `dst` beyond `src`."""
        way = []
        for dim, (a, b) in enumerate(zip(src, dst, strict=True)):
            for axis in b[len(a) :]:
                way.append(self._move(Slice, src, appended(src, [(axis, dim)]), (axis,), (dim,)))
                src = way[-1].after
        return way

    def gathers(self, src: Spec, dst: Spec) -> Iterator[Way]:
        """Ways to gather the axes that shard a dim in `src` beyond `dst`.

        A single collective where shards divide evenly or each dim has one axis to gather. Axis by axis, minor first,
        where a dim has several.
        """
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

    def exchange(self, src: Spec, dst: Spec) -> Move:
        """A single collective between any two specs: AllToAll, Permute or Exchange."""
        changed = [dim for dim, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]
        if len(changed) == 2:
            for out, into in (changed, changed[::-1]):
                axis = src[out][-1:]
                if axis and src[out][:-1] == dst[out] and dst[into] == src[into] + axis:
                    return self._move(AllToAll, src, dst, axis, (out, into))
        parts = all(self.sizes.parts(a) == self.sizes.parts(b) for a, b in zip(src, dst, strict=True))
        one_to_one = parts and self.sizes.even(src) and moving(src, dst) <= cutting(src) & cutting(dst)
        return self._move(Permute if one_to_one else Exchange, src, dst)

    def reduce(self, spec: Spec, scattered: Mapping[str, int], all_reduced: tuple[str, ...]) -> Way:
        """A reduce-scatter over `scattered`, then an all-reduce over `all_reduced`.

        scattered: axis -> the dim sharded by the axis afterwards.
        """
        way: Way = []
        axes, dims = tuple(scattered), tuple(scattered.values())
        after = appended(spec, scattered.items())
        if axes and self._in_one(after, spec, dims):
            fast_first = tuple(axis for axis in reversed(self.sizes.slow_first) if axis in axes)
            apart = fast_first if self.apart and len(axes) > 1 else ()
            way.append(self._move(ReduceScatter, spec, after, axes, dims, apart))
        else:
            for axis, dim in scattered.items():
                after = appended(spec, [(axis, dim)])
                way.append(self._move(ReduceScatter, spec, after, (axis,), (dim,)))
                spec = after
        if all_reduced:
            way.append(self._move(AllReduce, after, after, all_reduced))
        return way

    def reduce_exchange(self, src: Spec, dst: Spec) -> Move:
        """A reduction and an exchange in a single collective."""
        return self._move(ReduceExchange, src, dst)

    def _in_one(self, finer: Spec, coarser: Spec, dims: tuple[int, ...]) -> bool:
        """Whether a single collective may gather or scatter these dims.

        Either each dim has a single axis, or all parts have the same size.
        """
        return len(set(dims)) == len(dims) or all(self._divides(finer, coarser, dim) for dim in dims)

    def _divides(self, finer: Spec, coarser: Spec, dim: int) -> bool:
        """Whether the axes of `finer` beyond `coarser` cut a dim evenly."""
        extra = finer[dim][len(coarser[dim]) :]
        return self.sizes.extent(dim, coarser[dim]) % self.sizes.parts(extra) == 0 and self.sizes.even(coarser)

    def _move(
        self,
        kind: type[Step],
        src: Spec,
        dst: Spec,
        axes: tuple[str, ...] = (),
        dims: tuple[int, ...] = (),
        apart: tuple[str, ...] = (),
    ) -> Move:
        return Move(kind, axes, dims, dst, self.sizes.traffic(kind, axes, src, dst, apart), apart)


def _orders(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Orders in which to gather the axes in turn: all orders of up to three axes, else this order and its reverse."""
    return permutations(axes) if len(axes) <= 3 else iter((axes, axes[::-1]))
