"""An op whose operands lie on a mesh and on one whose axes are parts of its axes: it is computed on the finer of the two.

So lie, with more ranks than key heads, queries on the mesh of the model, and keys on one that tells the axis of the heads from that
of their copies. What an op gives, and a gradient, is said on the coarser mesh where that can say it. Nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate
from weft.mesh.refinement import coarsened, parts_of_axes, refined
from weft.reshard.running.groups import this_rank

from .rules import Shapes

Layouts = tuple[Layout | None, ...]


class Meshes(NamedTuple):
    """fine: on which an op is computed. coarse: that of an operand with the fewest axes; the same, but where there are two."""

    fine: ProcessMesh
    coarse: ProcessMesh

    @classmethod
    def of(cls, layouts: Layouts) -> Meshes:
        """Those of operands on one mesh, or of which one cuts the axes of the others; else of the first, for the rule to refuse."""
        meshes = list(dict.fromkeys(layout.mesh for layout in layouts if layout is not None))
        fine, coarse = max(meshes, key=lambda mesh: mesh.ndim), min(meshes, key=lambda mesh: mesh.ndim)
        if len(meshes) > 1 and all(parts_of_axes(fine, mesh) for mesh in meshes):
            return cls(fine, coarse)
        return cls(meshes[0], meshes[0])

    def refine(self, layouts: Layouts, shapes: Shapes) -> Layouts:
        """Those of operands, or of outputs' gradients, on the fine mesh. Raises LayoutError for uneven shards."""
        if self.fine == self.coarse:
            return layouts
        return tuple(
            layout if layout is None or shape is None or layout.mesh == self.fine else refined(layout, self.fine, shape)
            for layout, shape in zip(layouts, shapes, strict=True)
        )

    def coarsen(self, lying: Sequence[tuple[Layout, tuple[int, ...]]]) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Layout and shape of each output, on the coarse mesh where it can say them."""
        if self.fine == self.coarse:
            return tuple(lying)
        return tuple((coarsened(layout, self.coarse, shape) or layout, shape) for layout, shape in lying)

    def as_given(
        self, name: str, part: Tensor, layout: Layout, own: Layout, shape: tuple[int, ...]
    ) -> tuple[Tensor, Layout]:
        """This rank's part of an operand's gradient, and how that lies on the mesh of the operand, whose layout is `own`.

        What is a sum over one part of an axis, and whole over another, becomes a sum over the axis, to which the first ranks alone
        add. Raises LayoutError where the mesh cannot say how it lies.
        """
        if layout.mesh == own.mesh:
            return part, layout
        found = coarsened(layout, own.mesh, shape)
        if found is not None:
            return part, found
        summed, first = _as_sums(layout, own.mesh)
        found = coarsened(summed, own.mesh, shape)
        if found is None:
            raise LayoutError(
                f"{name}: the gradient of an operand on {own.mesh} is ({layout}), which that mesh cannot say; reshard the "
                f"operand to {self.fine} before"
            )
        coordinate = layout.mesh.coordinate(this_rank()) or {}
        return (torch.zeros_like(part) if any(coordinate.get(axis, 0) for axis in first) else part), found


def _as_sums(layout: Layout, coarse: ProcessMesh) -> tuple[Layout, list[str]]:
    """The layout with Partial(sum) on the axes that are whole beside a sum over another part of the same axis; and those axes."""
    parts = parts_of_axes(layout.mesh, coarse) or {}
    axes = [
        axis
        for names in parts.values()
        if any(layout[axis] == Partial("sum") for axis in names)
        for axis in names
        if layout[axis] == Replicate()
    ]
    return layout.replace(**dict.fromkeys(axes, Partial("sum"))), axes
