"""Ops with operands on two meshes, one a refinement of the other, with axes split in parts. The finer mesh is used.

An example is attention with more ranks than key heads: queries are on the model's mesh, and keys on a mesh that
splits the tp axis into one part over the heads and one over their copies. Each output and gradient is expressed on
the coarser mesh if possible. Nothing is moved between ranks.
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
    """The two meshes of an op's operands. Made by `Meshes.of`; both are the same if all operands are on one mesh."""

    fine: ProcessMesh  # with the most axes; the op is computed on it
    coarse: ProcessMesh  # with the fewest axes

    @classmethod
    def of(cls, layouts: Layouts) -> Meshes:
        """The meshes of these operands' layouts.

        If the meshes are not refinements of one another, the first is returned for both, and the op's rule raises the
        error.
        """
        meshes = list(dict.fromkeys(layout.mesh for layout in layouts if layout is not None))
        fine, coarse = max(meshes, key=lambda mesh: mesh.ndim), min(meshes, key=lambda mesh: mesh.ndim)
        if len(meshes) > 1 and all(parts_of_axes(fine, mesh) for mesh in meshes):
            return cls(fine, coarse)
        return cls(meshes[0], meshes[0])

    def refine(self, layouts: Layouts, shapes: Shapes) -> Layouts:
        """Express layouts of operands, or of outputs' gradients, on the fine mesh. LayoutError for uneven shards."""
        if self.fine == self.coarse:
            return layouts
        return tuple(
            layout if layout is None or shape is None or layout.mesh == self.fine else refined(layout, self.fine, shape)
            for layout, shape in zip(layouts, shapes, strict=True)
        )

    def coarsen(self, outputs: Sequence[tuple[Layout, tuple[int, ...]]]) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Layout and shape of each output, expressed on the coarse mesh if possible."""
        if self.fine == self.coarse:
            return tuple(outputs)
        return tuple((coarsened(layout, self.coarse, shape) or layout, shape) for layout, shape in outputs)

    def to_operand_mesh(
        self, name: str, part: Tensor, layout: Layout, operand: Layout, shape: tuple[int, ...]
    ) -> tuple[Tensor, Layout]:
        """Express an operand's gradient on the operand's own mesh. Returns this rank's part and the layout.

        part: this rank's part, with `layout`. operand: the operand's layout. name: of the op.
        A gradient may be Partial(sum) over one part of an axis of the operand's mesh and replicated over another
        part. It becomes Partial(sum) over the whole axis: ranks other than the first along the replicated part
        contribute zeros.
        Raises LayoutError if the operand's mesh cannot express the layout.
        """
        if layout.mesh == operand.mesh:
            return part, layout
        coarse = coarsened(layout, operand.mesh, shape)
        if coarse is not None:
            return part, coarse
        summed, were_replicated = _as_sums(layout, operand.mesh)
        coarse = coarsened(summed, operand.mesh, shape)
        if coarse is None:
            raise LayoutError(
                f"{name}: the gradient of an operand on {operand.mesh} has layout ({layout}), which that mesh cannot "
                f"express; reshard the operand to {self.fine} first"
            )
        coordinate = layout.mesh.coordinate(this_rank()) or {}
        return (torch.zeros_like(part) if any(coordinate.get(axis, 0) for axis in were_replicated) else part), coarse


def _as_sums(layout: Layout, coarse: ProcessMesh) -> tuple[Layout, list[str]]:
    """Replace Replicate() by Partial(sum) on axes next to a sum over another part of the same coarse axis.

    Returns the layout and the axes changed.
    """
    parts = parts_of_axes(layout.mesh, coarse) or {}
    axes = [
        axis
        for names in parts.values()
        if any(layout[axis] == Partial("sum") for axis in names)
        for axis in names
        if layout[axis] == Replicate()
    ]
    return layout.replace(**dict.fromkeys(axes, Partial("sum"))), axes
