"""Moves: candidate steps between specs, with their traffic, and `Links`, which prices the traffic on each mesh axis.

The search (search.py) compares ways: lists of moves.

A spec (`ShardSpec`) lists for each dim the axes that shard the dim, major first.
The traffic of a move says, for each axis, how many messages and elements the busiest rank receives. The traffic follows
from sizes alone: every part is taken to be as large as the first rank's. This is exact where sizes divide evenly, and
otherwise counts padding. The algorithms counted:

all-gather, reduce-scatter   p - 1 messages of one part, direct or in a ring; with `apart`, in a collective per axis
all-reduce                   a reduce-scatter and an all-gather of ceil(n / p) elements; p ranks, n elements on each
all-to-all, exchange         the elements needed and lacked by a rank, from the nearest holders
slice, make-partial          nothing

A message uses the slowest of the axes in which the two ranks differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

from weft.mesh import ProcessMesh
from weft.mesh.extension import chunk, is_number, largest_part

from .layouts import ShardSpec, append_axes, moved_axes, sharding_axes
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


@dataclass(frozen=True, slots=True)
class Link:
    """How fast a rank receives along an axis."""

    latency: float  #: seconds per message
    bandwidth: float  #: bytes per second

    def __post_init__(self) -> None:
        if not (is_number(self.latency) and 0 <= self.latency < math.inf):
            raise ValueError(f"a link's latency is {self.latency!r} s; give a finite number of seconds >= 0")
        if not (is_number(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"a link's bandwidth is {self.bandwidth!r} bytes/s; give a number > 0")


UNUSED = Link(0.0, math.inf)  # for an axis of size 1, which carries no messages


@dataclass(frozen=True, slots=True, init=False)
class Links:
    """The links of a mesh's axes. `Topology` is the public form. between: None: the slowest of the axes' links."""

    links: tuple[tuple[str, Link], ...]  # (axis, link), sorted by axis
    between: Link  # between ranks of different meshes; by default the slowest of the axes' links

    def __init__(self, links: Mapping[str, Link], between: Link | None = None) -> None:
        if not isinstance(links, Mapping):
            raise ValueError(f"the links of the Topology are {links!r}; give the link of each axis by the axis' name")
        if not links:
            raise ValueError("the Topology has no axes; give the link of each axis, as in {'tp': Link(2e-6, 400e9)}")
        for axis, link in links.items():
            if not isinstance(link, Link):
                raise ValueError(f"axis {axis!r} has the link {link!r}; give Link(latency, bandwidth)")
        if between is not None and not isinstance(between, Link):
            raise ValueError(f"between is {between!r}; give Link(latency, bandwidth), or None")
        object.__setattr__(self, "links", tuple(sorted(links.items(), key=lambda item: item[0])))
        object.__setattr__(
            self, "between", between or min(links.values(), key=lambda link: (link.bandwidth, -link.latency))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self.links), self.between)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.links)}, between={self.between})"

    def link(self, axis: str) -> Link:
        """The link of `axis`. Raises ValueError for an axis without a link."""
        for name, link in self.links:
            if name == axis:
                return link
        axes = ", ".join(name for name, _ in self.links)
        raise ValueError(f"the topology has no link for axis {axis!r}; its axes are {axes}; give a link for each axis")

    def seconds(self, traffic: Mapping[str, tuple[int, int]]) -> float:
        """Time to receive all messages, one axis after the other.

        traffic: axis -> (messages, bytes), as {"tp": (3, 4096)}.
        """
        links = ((self.link(axis), *moved) for axis, moved in traffic.items())
        return sum(messages * link.latency + nbytes / link.bandwidth for link, messages, nbytes in links)


TrafficByAxis = dict[str, tuple[int, int]]  # axis -> (messages, elements) received by the busiest rank


class Move(NamedTuple):
    """A candidate step from a spec to the spec `after`.

    The search compares moves, and makes steps of the best way alone; with a memory limit, of way after way until one
    fits.
    """

    kind: type[Step]  # class of the step
    axes: tuple[str, ...]  # axes changed by the step; empty for steps that take a target layout, such as Exchange
    dims: tuple[int, ...]  # the dims of these axes; for AllToAll, the dims before and after
    after: ShardSpec  # spec after the step
    traffic: TrafficByAxis
    apart: tuple[str, ...]  # the axes in the order of their collectives; empty for one collective over all axes


Way = list[Move]


@dataclass(frozen=True, slots=True)
class MoveBuilder:
    """Makes the moves between specs of a tensor, for `Candidates`."""

    sizes: Sizes
    # Whether to list gathers over several axes both as a single collective and as a collective per axis, in several
    # orders. `Candidates` then lists more ways, too.
    thorough: bool
    apart: bool  # whether to reduce over several axes by a collective per axis, the fastest axis first

    def slices(self, src: ShardSpec, dst: ShardSpec) -> Way:
        """Slices along the axes which `dst` adds to `src`.

        In `dst`, each dim's axes must begin with the dim's axes in `src`.
        """
        way = []
        for dim, (a, b) in enumerate(zip(src, dst, strict=True)):
            for axis in b[len(a) :]:
                way.append(self._move(Slice, src, append_axes(src, [(axis, dim)]), (axis,), (dim,)))
                src = way[-1].after
        return way

    def gathers(self, src: ShardSpec, dst: ShardSpec) -> Iterator[Way]:
        """Ways to gather the axes which `dst` lacks. In `src`, each dim's axes must begin with the dim's axes in `dst`.

        First, ways of one AllGather for all axes: as one collective, and if `thorough` also as one collective per axis
        (`Move.apart`). These need shards of equal size, or a single axis to gather in each dim. Last, where a dim has
        several axes to gather or if `thorough`, a way of an AllGather for each axis, minor axes first.
        """
        cut = [(axis, dim) for dim, (a, b) in enumerate(zip(src, dst, strict=True)) for axis in a[len(b) :]]
        if not cut:
            yield []
            return
        axes, dims = tuple(axis for axis, _ in cut), tuple(dim for _, dim in cut)
        if self._in_one_collective(src, dst, dims):
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

    def exchange(self, src: ShardSpec, dst: ShardSpec) -> Move:
        """A single collective between any two specs.

        AllToAll where an axis goes from a dim to another; Permute where each rank's whole part goes to a single rank;
        Exchange in all further cases.
        """
        changed = [dim for dim, (a, b) in enumerate(zip(src, dst, strict=True)) if a != b]
        if len(changed) == 2:
            for out, into in (changed, changed[::-1]):
                axis = src[out][-1:]
                if axis and src[out][:-1] == dst[out] and dst[into] == src[into] + axis:
                    return self._move(AllToAll, src, dst, axis, (out, into))
        parts = all(self.sizes.parts(a) == self.sizes.parts(b) for a, b in zip(src, dst, strict=True))
        one_to_one = parts and self.sizes.even(src) and moved_axes(src, dst) <= sharding_axes(src) & sharding_axes(dst)
        return self._move(Permute if one_to_one else Exchange, src, dst)

    def reduce(self, spec: ShardSpec, scattered: Mapping[str, int], all_reduced: tuple[str, ...]) -> Way:
        """Reduce-scatters over `scattered`, in one collective where the sizes allow, then an all-reduce.

        scattered: axis -> the dim sharded by the axis afterwards.
        """
        way: Way = []
        axes, dims = tuple(scattered), tuple(scattered.values())
        after = append_axes(spec, scattered.items())
        if axes and self._in_one_collective(after, spec, dims):
            fast_first = tuple(axis for axis in reversed(self.sizes.slow_first) if axis in axes)
            apart = fast_first if self.apart and len(axes) > 1 else ()
            way.append(self._move(ReduceScatter, spec, after, axes, dims, apart))
        else:
            for axis, dim in scattered.items():
                after = append_axes(spec, [(axis, dim)])
                way.append(self._move(ReduceScatter, spec, after, (axis,), (dim,)))
                spec = after
        if all_reduced:
            way.append(self._move(AllReduce, after, after, all_reduced))
        return way

    def reduce_exchange(self, src: ShardSpec, dst: ShardSpec) -> Move:
        """A reduction and an exchange in a single collective."""
        return self._move(ReduceExchange, src, dst)

    def _in_one_collective(self, finer: ShardSpec, coarser: ShardSpec, dims: tuple[int, ...]) -> bool:
        """Whether a single collective may gather from the spec `finer` to `coarser`, or scatter from there to `finer`.

        True if each dim has a single axis of these, or if all parts have the same size.
        dims: the dim of each axis gathered or scattered.
        """
        return len(set(dims)) == len(dims) or all(self._divides(finer, coarser, dim) for dim in dims)

    def _divides(self, finer: ShardSpec, coarser: ShardSpec, dim: int) -> bool:
        """Whether the axes which only `finer` has cut the dim evenly."""
        extra = finer[dim][len(coarser[dim]) :]
        return self.sizes.extent(dim, coarser[dim]) % self.sizes.parts(extra) == 0 and self.sizes.even(coarser)

    def _move(
        self,
        kind: type[Step],
        src: ShardSpec,
        dst: ShardSpec,
        axes: tuple[str, ...] = (),
        dims: tuple[int, ...] = (),
        apart: tuple[str, ...] = (),
    ) -> Move:
        return Move(kind, axes, dims, dst, self.sizes.traffic(kind, axes, src, dst, apart), apart)


def _orders(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Orders in which to gather the axes in turn: all orders of up to three axes, else this order and its reverse."""
    return permutations(axes) if len(axes) <= 3 else iter((axes, axes[::-1]))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes needed for prices: of a tensor and of a mesh. Made by `sizes_of`."""

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

    def local(self, spec: ShardSpec) -> int:
        """Number of elements in the first rank's part."""
        return math.prod(self.extent(dim, axes) for dim, axes in enumerate(spec))

    def even(self, spec: ShardSpec) -> bool:
        """Whether all ranks' parts have the size of the first rank's."""
        return all(self.shape[dim] % self.parts(axes) == 0 for dim, axes in enumerate(spec) if axes)

    def traffic(
        self, kind: type[Step], axes: Sequence[str], src: ShardSpec, dst: ShardSpec, apart: Sequence[str] = ()
    ) -> TrafficByAxis:
        """Traffic of a step of this kind over `axes`, from spec `src` to spec `dst`, as for `Move`."""
        if kind is AllGather or kind is ReduceScatter:
            part, order = (self.local(src), apart) if kind is AllGather else (self.local(dst), apart[::-1])
            return self._gathered_apart(part, order) if order else self._gathered(part, axes)
        if kind is AllReduce:
            once = self._gathered(-(-self.local(src) // self.parts(axes)), axes)
            return {axis: (2 * messages, 2 * received) for axis, (messages, received) in once.items()}
        if kind is Slice or kind is MakePartial:
            return {}
        # A ReduceExchange sends the messages of its dual, the exchange from `dst` to `src`, backwards.
        return self._exchanged(dst, src) if kind is ReduceExchange else self._exchanged(src, dst)

    def _gathered(self, part: int, axes: Sequence[str]) -> TrafficByAxis:
        """Traffic of a single gather over all axes. part: elements of a rank's part."""
        traffic, reached = {}, 1  # ranks along the faster axes
        for axis in self._fast_first(axes):
            peers = (self.axes[axis] - 1) * reached
            traffic[axis] = (peers, peers * part)
            reached *= self.axes[axis]
        return traffic

    def _gathered_apart(self, part: int, axes: Sequence[str]) -> TrafficByAxis:
        """Traffic of a gather per axis, in this order. part: elements of a rank's part before the first."""
        traffic = {}
        for axis in axes:
            peers = self.axes[axis] - 1
            traffic[axis] = (peers, peers * part)
            part *= self.axes[axis]
        return traffic

    def _exchanged(self, src: ShardSpec, dst: ShardSpec) -> TrafficByAxis:
        """Traffic of an exchange: missing elements come from the nearest holder."""
        part = max(1, self.local(src))
        available, traffic = self.overlap(src, dst), {}
        near_axes: set[str] = set()
        for axis in self._fast_first(moved_axes(src, dst)):
            near_axes.add(axis)
            reachable = self.overlap(tuple(tuple(a for a in order if a not in near_axes) for order in src), dst)
            if reachable > available:
                traffic[axis] = (-(-(reachable - available) // part), reachable - available)
                available = reachable
        return traffic

    def overlap(self, src: ShardSpec, dst: ShardSpec) -> int:
        """Elements needed under `dst` and held under `src`, on the rank with the fewest.

        If in every dim the longer list of axes begins with the shorter list, the last rank has the fewest, because the
        last parts are the smallest. Otherwise some rank may hold none of the needed elements, and the result is 0.
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


def total(traffic: TrafficByAxis) -> int:
    """Elements received over all axes."""
    return sum(elements for _, elements in traffic.values())
