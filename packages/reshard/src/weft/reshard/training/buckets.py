"""Reduces many gradients by a single collective, in a flat tensor that is reduce-scattered, all-reduced or both.

A `Route` says how a parameter's gradient reaches the target layout; a `Bucket` moves gradients whose routes have the
same `key`. Used by gradient_buckets.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, Partial, Replicate, Shard

from ..moving.collectives import Pending, Running, all_reduce, reduce_scatter
from ..moving.dtensor import dtensor_spec, layout_of, wrap, wrap_with_spec
from ..moving.order_check import LazyText, announce
from ..moving.transfer import Stacking, crop, pad, stacking_of
from ..moving.tree import NO_ADDENDS, Addends, Members, addends_of, members_along, tree_order
from ..planning.costs import padded_part
from ..planning.layouts import drop_trivial_axes
from ..planning.steps import ReduceScatter, axes_of
from ..world.exact import exact_axes
from ..world.groups import group_along, process_mesh, this_rank
from .shared_memory import sum_parts

Owner = TypeVar("Owner")  # the owner of a gradient in a bucket: GradientSync's `Leaf`

# Called with each tensor newly held by a bucket: a waiting gradient, or the flat tensor of a reduction.
BufferListener = Callable[[Sequence[Tensor]], None]
_listeners: list[BufferListener] = []  # empty, or a single listener


@contextmanager
def observing_buckets(listener: BufferListener) -> Iterator[None]:
    """Inside, in this process, the listener is called with the tensors of every bucket; for tools to count memory.

    Used by weft.models' step/live_storages.py. Contexts must not be nested, nor run in several threads.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """How a gradient reaches the target layout: a reduce-scatter over some axes, then an all-reduce over the rest."""

    scatter: ReduceScatter  # over no axes where nothing is scattered
    all_reduced: tuple[str, ...]  # axes of the all-reduce

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of the reduce-scatter, and of the all-reduce.

        A part of `Route.key`. All gradients of a bucket have equal axes; the dims of the reduce-scatter may differ.
        """
        return axes_of(self.scatter), self.all_reduced


@lru_cache(maxsize=65536)
def reduction_between(src: Layout, dst: Layout, shape: tuple[int, ...]) -> GradientReduction | None:
    """The GradientReduction from a gradient's layout `src` to the target layout `dst`. Called by `Route.of`.

    shape: global, of the gradient.
    None where a reduce-scatter and an all-reduce do not suffice, as between different meshes, or where several axes cut
    a dim unevenly.
    """
    src, dst = drop_trivial_axes(src), drop_trivial_axes(dst)
    if src.mesh != dst.mesh:
        return None
    changed = [axis for axis in src.mesh.axis_names if src[axis] != dst[axis]]
    cut = {axis: Shard(dim) for dim, order in dst.shard_order.items() for axis in order if axis in changed}
    all_reduced = tuple(axis for axis in changed if axis not in cut)
    if (
        any(src[axis] != Partial() for axis in changed)
        or src.replace(**dict.fromkeys(all_reduced, Replicate()), **cut) != dst
    ):
        return None
    dims = tuple(placement.dim for placement in cut.values())
    if len(set(dims)) < len(dims) and any(shape[dim] % dst.parts(dim) for dim in dims):
        return None  # uneven parts of several axes: a collective for each axis
    return GradientReduction(ReduceScatter(tuple(cut), dims), all_reduced)


@dataclass(frozen=True, slots=True)
class AddendOrder:
    """When to add stacked addends (moving/tree.py), for sums over the axes in the tree's order.

    In turn: the addends of the axes `first` are added; the reduce-scatter, or else the all-reduce over `early`, runs;
    the addends of `pending` are added; the all-reduce over the remaining axes runs.
    Without stacked addends, and outside `exact_sums`, all fields are empty.
    """

    first: tuple[str, ...] = ()  # axes whose addends `Route.collapse` adds, before the gradient is in a bucket
    early: tuple[str, ...] = ()  # axes of the all-reduce before the addends of `pending` are added
    pending: Addends = NO_ADDENDS  # the addends that are added after the bucket's first collective

    @classmethod
    def of(cls, addends: Addends, layout: Layout, target: Layout, reduction: GradientReduction) -> AddendOrder | None:
        """The order inside `exact_sums`; None where the collectives of `reduction` cannot keep the tree's order.

        Called by `Route.of`. layout: of the gradient. addends: the gradient's stacked addends.
        """
        place = {axis: index for index, axis in enumerate(tree_order(layout.mesh.axis_names))}
        scattered, all_reduced = ([place[axis] for axis in axes] for axes in reduction.axes)
        if any(layout[axis] != Partial() or isinstance(target[axis], Partial) for axis in addends.axes):
            return None
        if scattered and all_reduced and max(scattered) > min(all_reduced):
            return None
        innermost = min([*scattered, *all_reduced], default=len(place))
        first = tuple(axis for axis in addends.axes if place[axis] <= innermost)
        pending = addends.without(first)
        if not pending.axes:
            return cls(first)
        places = [place[axis] for axis in pending.axes]
        early = () if scattered else tuple(axis for axis in reduction.all_reduced if place[axis] < min(places))
        late = [place[axis] for axis in reduction.all_reduced if axis not in early]
        if (scattered and max(scattered) >= min(places)) or (late and min(late) < max(places)):
            return None
        return cls(first, early, pending)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How a parameter's gradients in a given layout reach the target layout. A Leaf caches the last Route."""

    reduction: GradientReduction
    shape: tuple[int, ...]  # global, of the gradient
    key: Hashable  # equal for gradients in the same bucket
    nbytes: int  # bytes of the gradient on the first rank of the mesh
    stacking: Stacking  # how the reduce-scatter's parts are stacked
    part_elements: int  # number of elements in a part of the reduce-scatter, with padding
    local_shape: tuple[int, ...] | None  # of this rank's part of the result; None outside the target's mesh
    spec: Any  # the result's `dtensor_spec`
    addends: Addends  # stacked addends of the gradient
    addend_order: AddendOrder  # when to add the stacked addends

    @classmethod
    def of(cls, grad: DTensor, target: Layout) -> Route | None:
        """The Route to `target`; None where a reduce-scatter and an all-reduce do not suffice."""
        layout, shape = layout_of(grad), tuple(grad.shape)
        reduction = reduction_between(layout, target, shape)
        if reduction is None:
            return None
        addends = addends_of(layout) if this_rank() in layout.mesh else NO_ADDENDS
        order = AddendOrder() if exact_axes() is None else AddendOrder.of(addends, layout, target, reduction)
        if order is None:
            return None
        axes = axes_of(reduction.scatter)
        with torch.no_grad():
            local = grad.to_local()
        part = padded_part(reduction.scatter, layout, layout.local_shape(shape, this_rank()))
        sizes = tuple(layout.mesh.axis_size(axis) for axis in axes)
        return cls(
            reduction=reduction,
            shape=shape,
            key=(grad.device_mesh, reduction.axes, grad.dtype, order),
            nbytes=grad.dtype.itemsize * math.prod(layout.largest_local_shape(shape)),
            stacking=stacking_of(tuple(part), axes, sizes, reduction.scatter),
            part_elements=math.prod(part),
            local_shape=target.local_shape(shape, this_rank()) if this_rank() in target.mesh else None,
            spec=dtensor_spec(wrap(local.new_empty(0), target, shape)),
            addends=addends,
            addend_order=order,
        )

    def collapse(self, local: Tensor) -> Tensor:
        """This rank's part for a bucket: `local` with the stacked addends of the axes `AddendOrder.first` added.

        Called by GradientBuckets and `GradientSync._accept_local_grad`. local: the local gradient from backward.
        """
        return self.addends.collapse(local, self.addend_order.first)

    def stacked(self, local: Tensor) -> Tensor:
        """The parts into which a local gradient is scattered: [parts, addends * part_elements].

        Called when the bucket starts a reduce-scatter. local: from `collapse`.
        With pending addends, a row holds the parts of all addends in turn; otherwise addends is 1.
        """
        stacking, pending = self.stacking, self.addend_order.pending
        addends = local.flatten(0, len(pending.axes) - 1).unbind() if pending.axes else (local,)
        parts = [
            stacking.as_stacked(pad(each, stacking.padded_shape)).reshape(math.prod(stacking.sizes), -1)
            for each in addends
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Bucket(Generic[Owner]):
    """Gradients with equal `Route.key`, reduced together in a flat tensor.

    Made, filled, started and finished by GradientBuckets. Each gradient is added for an owner (a `Leaf`), to which
    `finish` returns the sum.
    nbytes: bytes of the gradients on the first rank of the mesh; equal on every rank.
    is_open: whether gradients can be added: until `start`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self.nbytes, self.is_open = mesh, 0, True
        self._routes: dict[Owner, Route] = {}
        self._grads: dict[Owner, Tensor] = {}  # this rank's parts, until the collective starts

    def __contains__(self, owner: Owner) -> bool:
        """Whether the bucket has a gradient of the owner."""
        return owner in self._routes

    def add(self, owner: Owner, local: Tensor, route: Route) -> None:
        """Adds this rank's part of the owner's gradient, from `Route.collapse`; parts of the same owner are summed."""
        if owner in self._grads:
            self._grads[owner] = self._grads[owner] + local
        else:
            self._grads[owner], self._routes[owner] = local, route
            self.nbytes += route.nbytes
        for listener in _listeners:
            listener((self._grads[owner],))

    def start(self) -> None:
        """Starts the bucket's first collective."""
        self.is_open = False
        mesh = process_mesh(self._mesh)
        if this_rank() in mesh:
            announce(LazyText(self._description), meshes=(mesh,))
        with torch.no_grad():
            self._pending = Pending(self._run())

    def finish(self) -> list[tuple[Owner, DTensor]]:
        """Waits for the collectives. Returns each owner with the gradient in the target layout."""
        results = []
        with torch.no_grad():
            flat = self._pending.wait()
            for listener in _listeners:
                listener((flat,))
            sizes = [0 if route.local_shape is None else route.part_elements for route in self._routes.values()]
            for (owner, route), part in zip(self._routes.items(), flat.split_with_sizes(sizes), strict=True):
                if route.local_shape is not None:
                    part = part.view(route.stacking.part)
                    part = part if route.local_shape == route.stacking.part else crop(part, route.local_shape)
                results.append((owner, _wrap_part(part, route.spec)))
        return results

    def _run(self) -> Running:
        route = next(iter(self._routes.values()))
        grads, self._grads = self._grads, {}  # a gradient is freed once copied into the flat tensor
        if route.local_shape is None:  # outside the mesh all parts are empty; `finish` splits an empty tensor
            return next(iter(grads.values()))
        scattered, all_reduced = route.reduction.axes
        early, has_pending = route.addend_order.early, bool(route.addend_order.pending.axes)
        late = tuple(axis for axis in all_reduced if axis not in early)
        if scattered:
            flat = torch.cat([self._routes[owner].stacked(local) for owner, local in grads.items()], 1)
            grads.clear()
            for listener in _listeners:
                listener((flat,))
            phase = group_along(self._mesh, scattered)
            flat = yield from reduce_scatter(flat, "sum", [phase], [self._members(scattered)])
        else:
            parts = [*grads.values()]
            grads.clear()
            if late and not early:
                return (yield from sum_parts(parts, group_along(self._mesh, late)[0], self._members(late)))
            flat = torch.cat([part.reshape(-1) for part in parts])
            if early:
                flat = yield from all_reduce(flat, "sum", group_along(self._mesh, early)[0], self._members(early))
        if has_pending:
            flat = self._collapse_pending(flat)
        if late:
            flat = yield from all_reduce(flat, "sum", group_along(self._mesh, late)[0], self._members(late))
        return flat

    def _members(self, axes: tuple[str, ...]) -> Members:
        return members_along(process_mesh(self._mesh), axes, group_along(self._mesh, axes)[1])

    def _collapse_pending(self, flat: Tensor) -> Tensor:
        """Adds the pending addends of each gradient in the flat tensor."""
        routes = [*self._routes.values()]
        sizes = [math.prod(route.addend_order.pending.sizes) * route.part_elements for route in routes]
        sums = []
        for route, part in zip(routes, flat.split_with_sizes(sizes), strict=True):
            pending = route.addend_order.pending
            sums.append(pending.collapse(part.view(*pending.sizes, route.part_elements), pending.axes))
        return torch.cat(sums)

    def _description(self) -> str:
        route = next(iter(self._routes.values()))
        shapes = [route.shape for route in self._routes.values()]
        dtype = next(iter(self._grads.values())).dtype
        return f"gradients of shapes {shapes}, {dtype}, summed over {route.reduction.axes}"


def _wrap_part(part: Tensor, spec: Any) -> DTensor:
    """A DTensor of a part of a flat tensor, which copy.deepcopy can copy.

    A DTensor has the storage offset of the tensor from which it was made, and deepcopy refuses an offset (torch 2.13).
    """
    local = part.new_empty(0)
    dtensor = wrap_with_spec(local, spec)
    with torch.no_grad():
        local.set_(part)  # type: ignore[call-overload]  # torch has no types for a tensor alone
    return dtensor
