"""Stacked addends: the local tensor of a Partial value inside `exact_sums`, on a rank with several coordinates.

The rank's local tensor is the stack of the coordinates' local tensors on the named mesh, in the order of the
coordinates: a leading dim for each Partial axis with a fold above 1, in the order of the mesh's axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial

from ..planning.layouts import identity
from ..world.exact import exact_axes, folds
from .tree import tree_order, tree_reduce


@dataclass(frozen=True, slots=True)
class Addends:
    """The leading dims of a local tensor with stacked addends."""

    axes: tuple[str, ...] = ()  # the mesh axis of each dim
    sizes: tuple[int, ...] = ()  # of the dims: coordinates of the named mesh for which the rank stands

    def collapse(self, local: Tensor, axes: Sequence[str], op: str = "sum") -> Tensor:
        """Adds the rank's own addends along `axes`, in the tree.

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
        """The leading dims that remain after `collapse` of `axes`."""
        left = [(axis, size) for axis, size in zip(self.axes, self.sizes, strict=True) if axis not in axes]
        return Addends(tuple(axis for axis, _ in left), tuple(size for _, size in left))


NO_ADDENDS = Addends()


def addends_of(layout: Layout) -> Addends:
    """The leading dims of a local tensor in this layout; none outside `exact_sums`.

    Raises ValueError for an axis of the mesh that does not divide the named size, and LayoutError for a Partial axis
    of several ranks whose fold is no power of two: a rank's addends are then no subtree.
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
    """The shape of a rank's local tensor, stacked addends included. shape: of the global tensor."""
    local = layout.local_shape(shape, rank)
    return (*addends_of(layout).sizes, *local) if rank in layout.mesh else local
