"""The moves that ways are made of: each a step before it has layouts, with what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from .pricing import Sizes, Traffic
from .spec import Spec, appended, cutting, moving
from .steps import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceExchange, ReduceScatter, Slice, Step


class Move(NamedTuple):
    """A step before it has layouts: `kind` of step, the axes it changes, their dims, and the spec after it."""

    kind: type[Step]
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    after: Spec
    traffic: Traffic
    apart: tuple[str, ...]


Way = list[Move]


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves between specs of a tensor.

    thorough: gathers over several axes are tried in one collective and in one for each, in every order of the axes.
    apart: reductions over several axes are one collective for each, the fastest axis first.
    """

    sizes: Sizes
    thorough: bool
    apart: bool

    def slices(self, src: Spec, dst: Spec) -> Way:
        """Each axis that `dst` has beyond `src`, sliced."""
        way = []
        for dim, (a, b) in enumerate(zip(src, dst, strict=True)):
            for axis in b[len(a) :]:
                way.append(self._move(Slice, src, appended(src, [(axis, dim)]), (axis,), (dim,)))
                src = way[-1].after
        return way

    def gathers(self, src: Spec, dst: Spec) -> Iterator[Way]:
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

    def exchange(self, src: Spec, dst: Spec) -> Move:
        """From any spec to any other in one collective."""
        changed = [dim for dim, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]
        if len(changed) == 2:
            for out, into in (changed, changed[::-1]):
                axis = src[out][-1:]
                if axis and src[out][:-1] == dst[out] and dst[into] == src[into] + axis:
                    return self._move(AllToAll, src, dst, axis, (out, into))
        parts = all(self.sizes.parts(a) == self.sizes.parts(b) for a, b in zip(src, dst, strict=True))
        one_to_one = parts and self.sizes.even(src) and moving(src, dst) <= cutting(src) & cutting(dst)
        return self._move(Permute if one_to_one else Exchange, src, dst)

    def reduce(self, spec: Spec, scattered: Mapping[str, int], others: tuple[str, ...]) -> Way:
        """A reduce-scatter over `scattered`, each axis over its dim, then an all-reduce over `others`."""
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
        if others:
            way.append(self._move(AllReduce, after, after, others))
        return way

    def reduce_exchange(self, src: Spec, dst: Spec) -> Move:
        """The reduction and the exchange in one."""
        return self._move(ReduceExchange, src, dst)

    def _in_one(self, finer: Spec, coarser: Spec, dims: tuple[int, ...]) -> bool:
        """Whether one collective may gather or scatter these dims: parts of one size, or one axis to each dim."""
        return len(set(dims)) == len(dims) or all(self._divides(finer, coarser, dim) for dim in dims)

    def _divides(self, finer: Spec, coarser: Spec, dim: int) -> bool:
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
    return permutations(axes) if len(axes) <= 3 else iter((axes, axes[::-1]))
