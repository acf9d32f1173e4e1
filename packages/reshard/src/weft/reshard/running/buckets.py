"""Gradients that go the same way, in one flat tensor: a reduce-scatter, an all-reduce, or one after the other."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, Partial, Replicate, Shard

from ..planning.costs import padded_part
from ..planning.layouts import without_trivial_axes
from ..planning.steps import ReduceScatter, axes_of
from .blocks import cut_to, taken_apart
from .collectives import Pending, Running, all_reduce, reduce_scatter
from .dtensor import layout_of, wrap
from .groups import group_along, process_mesh, this_rank
from .order import announce


@dataclass(frozen=True, slots=True)
class Way:
    """How a gradient becomes its target: scattered over some axes, then all-reduced over others."""

    scatter: ReduceScatter
    reduced: tuple[str, ...]

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What gradients that travel together have in common; each may be cut over dims of its own."""
        return axes_of(self.scatter), self.reduced


@lru_cache(maxsize=65536)
def way_between(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Way | None:
    """The way from a gradient's layout to its target; None where it is not made of sums over axes alone."""
    src, dst = without_trivial_axes(src), without_trivial_axes(dst)
    if src.mesh != dst.mesh:
        return None
    changed = [axis for axis in src.mesh.axis_names if src[axis] != dst[axis]]
    cut = {axis: Shard(dim) for dim, order in dst.shard_order.items() for axis in order if axis in changed}
    reduced = tuple(axis for axis in changed if axis not in cut)
    if (
        any(src[axis] != Partial() for axis in changed)
        or src.replace(**dict.fromkeys(reduced, Replicate()), **cut) != dst
    ):
        return None
    dims = tuple(placement.dim for placement in cut.values())
    if len(set(dims)) < len(dims) and any(shape[dim] % dst.parts(dim) for dim in dims):
        return None  # parts of several sizes: not in one collective
    return Way(ReduceScatter(tuple(cut), dims), reduced)


class Bucket:
    """Gradients on one mesh that are summed over the same axes.

    nbytes: of the gradients on the first rank of the mesh, so that it is the same on every rank.
    """

    def __init__(self, key: Hashable) -> None:
        self.key, self.nbytes = key, 0
        self._items: dict[DTensor, tuple[DTensor, Layout, Way]] = {}

    def add(self, parameter: DTensor, grad: DTensor, target: Layout, way: Way) -> None:
        """Takes the gradient of `parameter` along, to be brought to `target`; added to one that waits here already."""
        layout = layout_of(grad)
        if parameter in self._items:
            earlier = self._items[parameter][0]
            with torch.no_grad():
                total = wrap(earlier.to_local() + grad.to_local(), layout, grad.shape)
            self._items[parameter] = (total, target, way)
            return
        self._items[parameter] = (grad, target, way)
        self.nbytes += grad.dtype.itemsize * math.prod(layout.largest_local_shape(grad.shape))

    def start(self) -> None:
        """Starts the first collective."""
        grad, _, way = self._first()
        mesh = process_mesh(grad.device_mesh)
        if this_rank() in mesh:
            shapes = [tuple(parameter.shape) for parameter in self._items]
            announce(f"gradients of shapes {shapes}, {grad.dtype}, summed over {way.axes}", meshes=(mesh,))
        with torch.no_grad():
            self._pending = Pending(self._run())

    def finish(self) -> Iterator[tuple[DTensor, DTensor]]:
        """Each parameter with its gradient as it was to become. Communication: waits for what was started."""
        with torch.no_grad():
            flat, offset = self._pending.wait(), 0
            for parameter, (grad, target, way) in self._items.items():
                part, mine = self._part(grad, way), target.local_shape(grad.shape, this_rank())
                local = flat.new_empty(0)
                if this_rank() in target.mesh:
                    local = cut_to(flat[offset : offset + math.prod(part)].view(part), mine)
                    offset += math.prod(part)
                yield parameter, wrap(local, target, grad.shape)

    def _run(self) -> Running:
        first, _, way = self._first()
        if this_rank() not in layout_of(first).mesh:
            return first.to_local()
        scattered, reduced = way.axes
        if scattered:
            flat = torch.cat([self._stacked(grad, way) for grad, _, way in self._items.values()], 1)
            flat = yield from reduce_scatter(flat, "sum", [group_along(first.device_mesh, scattered)])
        else:
            flat = torch.cat([grad.to_local().reshape(-1) for grad, _, _ in self._items.values()])
        if reduced:
            group, _ = group_along(first.device_mesh, reduced)
            flat = yield from all_reduce(flat, "sum", group)
        return flat

    def _first(self) -> tuple[DTensor, Layout, Way]:
        return next(iter(self._items.values()))

    def _part(self, grad: DTensor, way: Way) -> list[int]:
        return padded_part(way.scatter, layout_of(grad), grad.to_local().shape)

    def _stacked(self, grad: DTensor, way: Way) -> Tensor:
        """The parts of a gradient, one in each row."""
        axes = axes_of(way.scatter)
        sizes = {axis: layout_of(grad).mesh.axis_size(axis) for axis in axes}
        stacked = taken_apart(grad.to_local(), self._part(grad, way), axes, sizes, way.scatter)
        return stacked.reshape(math.prod(sizes.values()), -1)
