"""An op whose operands lie on a mesh and on one whose axes are parts of its axes: it is computed on the finer of the two.

So lie, with more ranks than key heads, queries on the mesh of the model, and keys on one that tells the axis of the heads from that
of their copies. What an op gives, and a gradient, is said on the coarser mesh where that can say it. Nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.mesh.refinement import coarsened, parts_of_axes, refined

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

    def gradient(
        self, name: str, layout: Layout | None, own: Layout | None, shape: tuple[int, ...] | None
    ) -> Layout | None:
        """That of an operand's gradient, on the mesh of the operand. Raises LayoutError where it cannot be said there."""
        if layout is None or own is None or shape is None or layout.mesh == own.mesh:
            return layout
        found = coarsened(layout, own.mesh, shape)
        if found is None:
            raise LayoutError(
                f"{name}: the gradient of an operand on {own.mesh} is ({layout}), which that mesh cannot say; reshard the "
                f"operand to {self.fine} before"
            )
        return found
