"""Gradients that go the same way, in one flat tensor: a reduce-scatter, an all-reduce, or one after the other."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, Partial, Replicate, Shard

from ..planning.costs import padded_part
from ..planning.layouts import without_trivial_axes
from ..planning.steps import ReduceScatter, axes_of
from .blocks import Stacking, cut_to, padded, stacking_of
from .collectives import Pending, Running, all_reduce, reduce_scatter
from .dtensor import kind_of, layout_of, of_kind, wrap
from .groups import group_along, process_mesh, this_rank
from .order import Words, announce
from .shared_memory import summed

Owner = TypeVar("Owner")


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


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How the gradients of a parameter that lie in one layout become their target, found once.

    shape: of the gradient. key: equal for what travels together. nbytes: of a gradient on the first rank of the mesh. stacking: of
    the parts that are scattered; size: the elements of one. mine: the shape of what this rank receives; None outside the target's
    mesh. kind: of what arrives, see `kind_of`.
    """

    way: Way
    shape: tuple[int, ...]
    key: Hashable
    nbytes: int
    stacking: Stacking
    size: int
    mine: tuple[int, ...] | None
    kind: Any

    @classmethod
    def of(cls, grad: DTensor, target: Layout) -> Route | None:
        """None where it is not made of sums over axes alone."""
        layout, shape = layout_of(grad), tuple(grad.shape)
        way = way_between(layout, target, shape)
        if way is None:
            return None
        axes = axes_of(way.scatter)
        with torch.no_grad():
            local = grad.to_local()
        part = padded_part(way.scatter, layout, local.shape)
        sizes = tuple(layout.mesh.axis_size(axis) for axis in axes)
        return cls(
            way=way,
            shape=shape,
            key=(grad.device_mesh, way.axes, grad.dtype),
            nbytes=grad.dtype.itemsize * math.prod(layout.largest_local_shape(shape)),
            stacking=stacking_of(tuple(part), axes, sizes, way.scatter),
            size=math.prod(part),
            mine=target.local_shape(shape, this_rank()) if this_rank() in target.mesh else None,
            kind=kind_of(wrap(local.new_empty(0), target, shape)),
        )

    def stacked(self, local: Tensor) -> Tensor:
        """The parts of a gradient, one in each row."""
        return self.stacking.of_whole(padded(local, self.stacking.whole)).reshape(math.prod(self.stacking.sizes), -1)


class Bucket(Generic[Owner]):
    """Gradients on one mesh that are summed over the same axes, each of an owner, which is found by its identity.

    nbytes: of the gradients on the first rank of the mesh, so that it is the same on every rank. is_open: until it starts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self.nbytes, self.is_open = mesh, 0, True
        self._routes: dict[Owner, Route] = {}
        self._grads: dict[Owner, Tensor] = {}  # this rank's parts, until the collective has them

    def add(self, owner: Owner, local: Tensor, route: Route) -> None:
        """Takes this rank's part of the owner's gradient along; added to one that waits here already."""
        if owner in self._grads:
            self._grads[owner] = self._grads[owner] + local
            return
        self._grads[owner], self._routes[owner] = local, route
        self.nbytes += route.nbytes

    def start(self) -> None:
        """Starts the first collective."""
        self.is_open = False
        mesh = process_mesh(self._mesh)
        if this_rank() in mesh:
            announce(Words(self._words), meshes=(mesh,))
        with torch.no_grad():
            self._pending = Pending(self._run())

    def finish(self) -> list[tuple[Owner, DTensor]]:
        """Each owner with its gradient as it was to become. Communication: waits for what was started."""
        found = []
        with torch.no_grad():
            flat = self._pending.wait()
            sizes = [0 if route.mine is None else route.size for route in self._routes.values()]
            for (owner, route), part in zip(self._routes.items(), flat.split_with_sizes(sizes), strict=True):
                if route.mine is not None:
                    part = part.view(route.stacking.part)
                    part = part if route.mine == route.stacking.part else cut_to(part, route.mine)
                found.append((owner, of_kind(part, route.kind)))
        return found

    def _run(self) -> Running:
        route = next(iter(self._routes.values()))
        grads, self._grads = self._grads, {}  # whole gradients live no longer than until they are in the flat tensor
        if route.mine is None:
            return next(iter(grads.values()))
        scattered, reduced = route.way.axes
        group = group_along(self._mesh, reduced)[0] if reduced else None
        if scattered:
            flat = torch.cat([self._routes[owner].stacked(local) for owner, local in grads.items()], 1)
            grads.clear()
            flat = yield from reduce_scatter(flat, "sum", [group_along(self._mesh, scattered)])
            return flat if group is None else (yield from all_reduce(flat, "sum", group))
        parts = [*grads.values()]
        grads.clear()
        return torch.cat([part.reshape(-1) for part in parts]) if group is None else (yield from summed(parts, group))

    def _words(self) -> str:
        route = next(iter(self._routes.values()))
        shapes = [each.shape for each in self._routes.values()]
        dtype = next(iter(self._grads.values())).dtype
        return f"gradients of shapes {shapes}, {dtype}, summed over {route.way.axes}"
