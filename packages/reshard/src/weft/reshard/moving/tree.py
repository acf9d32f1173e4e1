"""Exact sums: the addends that a rank holds, and the fixed binary tree which adds addends to the same bits.

Neighbours are added pairwise, each addition rounded to the tensor's dtype: ((0 + 1) + (2 + 3)). The last of an odd
number of addends goes up to the next level. A rank with an aligned block of 2^k addends can therefore add its block
first, and the blocks' sums are added afterwards. Over several mesh axes, `tree_order` says whose tree is innermost.

Inside `exact_sums`, on a rank with several coordinates, the local tensor of a Partial value is stacked addends: the
stack of the coordinates' local tensors on the named mesh, in the order of the coordinates. A leading dim stands for
each Partial axis with a fold above 1, in the order of the mesh's axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh

from ..planning.layouts import identity
from ..world.exact import exact_axes, folds
from ..world.world import Positions

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
# Elements of each addend which `tree_reduce` reduces at a time. The sums between two levels of the tree, up to half of
# the addends, then stay in a CPU's cache: memory of the size of the addends would take longer than the additions.
_CHUNK = 2**15
_INNERMOST = ("dp", "cp", "tp")  # the axes whose addends are added first, in this order


def tree_order(axis_names: Sequence[str]) -> tuple[str, ...]:
    """The axes in the order in which addends are added: dp, cp, tp, then the remaining axes in the order given.

    Called by plans of exact sums (stacked_plan.py), and by buckets.py. axis_names: some or all axes of a mesh.
    """
    rank = {axis: index for index, axis in enumerate(_INNERMOST)}
    return tuple(sorted(axis_names, key=lambda axis: rank.get(axis, len(rank))))


def tree_sum(stacked: Tensor) -> Tensor:
    """The sum over dim 0 by the binary tree, in the dtype of `stacked`. Called by `start_sum` in collectives.py.

    stacked: [n, *shape], n at least 1; not changed. Returns [*shape], which shares memory with `stacked` for n = 1.
    """
    return tree_reduce("sum", stacked, (0,))


def tree_reduce(op: str, stacked: Tensor, order: Sequence[int]) -> Tensor:
    """Reduces the first `len(order)` dims, dim after dim, each by the binary tree, in the dtype of `stacked`.

    op: "sum", "product", "min" or "max". order: the dims 0 to k, in the order in which the dims are reduced.
    stacked: [n_0, ..., n_k, *shape], each n at least 1; not changed. Returns [*shape], which shares memory with
    `stacked` where every n is 1.
    """
    count = len(order)
    shape, addends = stacked.shape[count:], math.prod(stacked.shape[:count])
    if addends > 2 and math.prod(shape) > _CHUNK and stacked.device.type == "cpu":
        flat = stacked.flatten(count)
        result = flat.new_empty(flat.shape[count:])
        for chunk, part in zip(torch.split(flat, _CHUNK, count), torch.split(result, _CHUNK), strict=True):
            part.copy_(_reduce_dims(op, chunk, order))
        return result.view(shape)
    return _reduce_dims(op, stacked, order)


def _reduce_dims(op: str, stacked: Tensor, order: Sequence[int]) -> Tensor:
    """`tree_reduce`, of all elements at a time."""
    remaining = [*order]
    while remaining:
        dim = remaining.pop(0)
        stacked = _reduce_dim(op, stacked, dim)
        remaining = [each - (each > dim) for each in remaining]
    return stacked


def _reduce_dim(op: str, stacked: Tensor, dim: int) -> Tensor:
    combine = _COMBINE[op]
    rows = stacked.movedim(dim, 0)
    while (count := rows.shape[0]) > 1:
        pairs = count // 2
        combined = combine(rows[0 : 2 * pairs : 2], rows[1 : 2 * pairs : 2])
        rows = torch.cat([combined, rows[-1:]]) if count % 2 else combined
    return rows[0]


class Members(NamedTuple):
    """A group's members as addends: the place in the tree of each member's addend.

    Made by `members_along`; along a single axis also by `reduce_scatter`, where the caller gives no Members.
    """

    positions: Positions  # by member, in the order of the group's ranks: the index along the axes, row-major
    sizes: tuple[int, ...]  # of the axes along which the members differ
    order: tuple[int, ...]  # the axes, as indices of `sizes`, innermost tree first

    def reduce(self, op: str, rows: Tensor) -> Tensor:
        """Reduces a row of each member in the tree, in the dtype of `rows`.

        Called after an exchange of rows: by collectives.py, the executor's reduce-exchange and shared_memory.py.
        op: as for `tree_reduce`. rows: [members, *shape], in the order of the group's ranks. Returns [*shape].
        """
        if not isinstance(self.positions, range):
            rows = rows[sorted(range(len(self.positions)), key=self.positions.__getitem__)]
        return tree_reduce(op, rows.reshape(*self.sizes, *rows.shape[1:]), self.order)


@lru_cache(maxsize=4096)
def _sizes_and_order(mesh: ProcessMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`Members.sizes` and `Members.order`."""
    names = [axis for axis in tree_order(mesh.axis_names) if axis in axes]
    return tuple(map(mesh.axis_size, axes)), tuple(axes.index(axis) for axis in names)


def members_along(mesh: ProcessMesh, axes: Sequence[str], positions: Positions) -> Members:
    """The Members of a rank's group along `axes` of `mesh`. Called by the executor and buckets.py.

    positions: each member's index along the axes, row-major, from `group_along` with the same axes.
    """
    sizes, order = _sizes_and_order(mesh, tuple(axes))
    assert math.prod(sizes) == len(positions), "a group along axes has a member for each coordinate"
    return Members(positions, sizes, order)


@dataclass(frozen=True, slots=True)
class Addends:
    """The leading dims of a local tensor with stacked addends; made by `addends_of`, and none outside `exact_sums`."""

    axes: tuple[str, ...] = ()  # the mesh axis of each dim
    sizes: tuple[int, ...] = ()  # of the dims: coordinates of the named mesh for which the rank stands

    def collapse(self, local: Tensor, axes: Sequence[str], op: str = "sum") -> Tensor:
        """Adds the rank's own addends along `axes`, in the tree. Communication: none.

        Called by a StackedPlan before each stage, and by buckets.py on gradients.
        local: [*sizes, *shape]. Returns a contiguous [*sizes of the remaining axes, *shape]; with no stacked axis in
        `axes`, `local` itself.
        """
        collapsed = [axis for axis in tree_order(self.axes) if axis in axes]
        if not collapsed:
            return local
        first = [self.axes.index(axis) for axis in collapsed]
        remaining = [dim for dim in range(len(self.axes)) if dim not in first]
        dims = (*first, *remaining, *range(len(self.axes), local.ndim))
        return tree_reduce(op, local.permute(dims), range(len(first))).contiguous()

    def stack_value(self, local: Tensor, layout: Layout) -> Tensor:
        """A rank's stacked addends of a value that `distribute` makes Partial.

        local: the addend of the rank's first coordinate. The further addends are the identity of the reduction, as 0
        for a sum, and `local` again for Partial("avg"). Returns [*sizes, *local.shape].
        """
        if not self.axes:
            return local
        placement = layout[self.axes[0]]
        assert isinstance(placement, Partial), "only Partial axes are stacked"
        op = placement.op  # a layout has a single op
        if op == "avg":
            return local.expand(*self.sizes, *local.shape).contiguous()
        stacked = local.new_full((*self.sizes, *local.shape), identity(op, local.dtype))
        stacked[(0,) * len(self.sizes)] = local
        return stacked

    def without(self, axes: Sequence[str]) -> Addends:
        """The leading dims that remain after `collapse` of `axes`. Called by stacked_plan.py and buckets.py."""
        left = [(axis, size) for axis, size in zip(self.axes, self.sizes, strict=True) if axis not in axes]
        return Addends(tuple(axis for axis, _ in left), tuple(size for _, size in left))


NO_ADDENDS = Addends()


def addends_of(layout: Layout) -> Addends:
    """The leading dims of a local tensor in this layout; none outside `exact_sums`.

    Called by `distribute`, `stacked_shape`, stacked_plan.py and buckets.py, and where a number of a DTensor is read.
    Raises ValueError for an axis of the mesh that does not divide the named size, and LayoutError for a Partial axis
    of several ranks whose fold, the number of a rank's stacked addends, is no power of two: the stack is no subtree.
    """
    if exact_axes() is None:
        return NO_ADDENDS
    mesh = layout.mesh
    stacked = [
        (axis, fold)
        for axis, fold, placement in zip(mesh.axis_names, folds(mesh), layout.placements, strict=True)
        if fold > 1 and isinstance(placement, Partial)
    ]
    for axis, fold in stacked:
        if fold & (fold - 1) and mesh.axis_size(axis) > 1:
            raise LayoutError(
                f"exact names {axis}={fold * mesh.axis_size(axis)}, and each coordinate of {axis}="
                f"{mesh.axis_size(axis)} stands for {fold}, no power of two: the tree adds across ranks in between; "
                f"choose {axis} so that the quotient is a power of two, or {axis}=1"
            )
    return Addends(tuple(axis for axis, _ in stacked), tuple(fold for _, fold in stacked))


def stacked_shape(layout: Layout, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape of a rank's local tensor, stacked addends included: [*addends_of(layout).sizes, *local shape].

    Called by `plan_change`, for zero gradients (pending_gradient.py), and by weft.models to make or to check stacks.
    shape: of the global tensor.
    """
    local = layout.local_shape(shape, rank)
    return (*addends_of(layout).sizes, *local) if rank in layout.mesh else local
