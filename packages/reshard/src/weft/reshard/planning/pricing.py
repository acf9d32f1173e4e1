"""The traffic of a move, from sizes alone: messages and elements received by the busiest rank on each axis.

Every part is taken to be as large as the first rank's. This is exact where sizes divide evenly, and
otherwise counts padding. The algorithms counted:

all-gather, reduce-scatter   p - 1 messages of one part, direct or in a ring; apart: the same on each axis in turn
all-reduce                   a reduce-scatter and an all-gather of ceil(n / p) elements
all-to-all, exchange         the elements needed and lacked by a rank, from the nearest holders
slice, make-partial          nothing

A message uses the slowest of the axes in which its two ranks differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.mesh import ProcessMesh
from weft.mesh.extents import chunk, largest_part

from .links import Links
from .spec import Spec, moving
from .steps import AllGather, AllReduce, MakePartial, ReduceExchange, ReduceScatter, Slice, Step

Traffic = dict[str, tuple[int, int]]  # axis -> (messages, elements) received by the busiest rank


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that pricing needs: of a tensor and of a mesh. Made by `sizes_of`."""

    shape: tuple[int, ...]  # of the tensor
    axes: Mapping[str, int]  # axis -> size
    slow_first: tuple[str, ...]  # the axes, slowest first

    def parts(self, axes: Iterable[str]) -> int:
        """Number of ranks along `axes`."""
        return math.prod(self.axes[axis] for axis in axes)

    def extent(self, dim: int, axes: Sequence[str]) -> int:
        """Size of the first part of a dim cut by `axes`."""
        size = self.shape[dim]
        for axis in axes:
            size = largest_part(size, self.axes[axis])
        return size

    def local(self, spec: Spec) -> int:
        """Number of elements in the first rank's part."""
        return math.prod(self.extent(dim, axes) for dim, axes in enumerate(spec))

    def even(self, spec: Spec) -> bool:
        """Whether all ranks' parts have the size of the first rank's."""
        return all(self.shape[dim] % self.parts(axes) == 0 for dim, axes in enumerate(spec) if axes)

    def traffic(
        self, kind: type[Step], axes: Sequence[str], src: Spec, dst: Spec, apart: Sequence[str] = ()
    ) -> Traffic:
        """Traffic of a step of this kind over `axes`, from spec `src` to spec `dst`."""
        if kind is AllGather or kind is ReduceScatter:
            part, order = (self.local(src), apart) if kind is AllGather else (self.local(dst), apart[::-1])
            return self._gathered_apart(part, order) if order else self._gathered(part, axes)
        if kind is AllReduce:
            once = self._gathered(-(-self.local(src) // self.parts(axes)), axes)
            return {axis: (2 * messages, 2 * received) for axis, (messages, received) in once.items()}
        if kind is Slice or kind is MakePartial:
            return {}
        return self._exchanged(dst, src) if kind is ReduceExchange else self._exchanged(src, dst)

    def _gathered(self, part: int, axes: Sequence[str]) -> Traffic:
        """Traffic of a single gather over all axes. part: elements of a rank's part."""
        traffic, reached = {}, 1  # ranks along the faster axes
        for axis in self._fast_first(axes):
            peers = (self.axes[axis] - 1) * reached
            traffic[axis] = (peers, peers * part)
            reached *= self.axes[axis]
        return traffic

    def _gathered_apart(self, part: int, axes: Sequence[str]) -> Traffic:
        """Traffic of a gather per axis, in this order. part: elements of a rank's part before the first."""
        traffic = {}
        for axis in axes:
            peers = self.axes[axis] - 1
            traffic[axis] = (peers, peers * part)
            part *= self.axes[axis]
        return traffic

    def _exchanged(self, src: Spec, dst: Spec) -> Traffic:
        """Traffic of an exchange: missing elements come from the nearest holder."""
        part = max(1, self.local(src))
        found, traffic = self.overlap(src, dst), {}
        near: set[str] = set()
        for axis in self._fast_first(moving(src, dst)):
            near.add(axis)
            reach = self.overlap(tuple(tuple(a for a in order if a not in near) for order in src), dst)
            if reach > found:
                traffic[axis] = (-(-(reach - found) // part), reach - found)
                found = reach
        return traffic

    def overlap(self, src: Spec, dst: Spec) -> int:
        """Elements needed under `dst` and held under `src`, on the rank with the fewest.

        0 where both specs cut a dim in different ways. Otherwise the last part's elements, the smallest part.
        """
        elements = 1
        for dim, (a, b) in enumerate(zip(src, dst, strict=True)):
            longer, shorter = (a, b) if len(a) > len(b) else (b, a)
            if longer[: len(shorter)] != shorter:
                return 0
            size = self.extent(dim, shorter)
            for axis in longer[len(shorter) :]:
                start, stop = chunk(size, self.axes[axis], self.axes[axis] - 1)
                size = stop - start
            elements *= size
        return elements

    def _fast_first(self, axes: Iterable[str]) -> list[str]:
        """The axes, fastest first."""
        return [axis for axis in reversed(self.slow_first) if axis in axes]


def sizes_of(mesh: ProcessMesh, shape: tuple[int, ...], topology: Links | None) -> Sizes:
    """The sizes of a tensor on a mesh. Without a topology, outer axes count as slower than inner axes."""
    names = mesh.axis_names
    if topology is not None:
        names = tuple(sorted(names, key=lambda axis: topology.link(axis).bandwidth))
    return Sizes(shape, dict(zip(mesh.axis_names, mesh.shape, strict=True)), names)


def total(traffic: Traffic) -> int:
    """Elements received over all axes."""
    return sum(elements for _, elements in traffic.values())
