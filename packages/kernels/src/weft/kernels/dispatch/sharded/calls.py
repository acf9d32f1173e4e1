"""`Call`: layouts and this rank's options of an op, for operands of given shapes, dtypes and layouts.

Cached until the process groups end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.mesh.extension import coarsened, parts_of_axes, refined
from weft.reshard import Slice, layout_of, plan, reshard
from weft.reshard.extension import dtensor_spec, process_mesh, shape_of, this_rank, world_cache, wrap, wrap_with_spec

from ..backend import is_compiling
from ..op import Op
from .rules import Shapes, Sharding, sharding_of

Layouts = tuple[Layout | None, ...]

# Cached DTensor specs by (position, dtype), so that wrapping does not look up the layout.
Kinds = dict[tuple[int, torch.dtype], Any]


class Flow(NamedTuple):
    """The layouts of an op's gradients, for output gradients of given specs. Cached by `Call.flow`."""

    sliced: tuple[Layout | None, ...]  # the layout to cut each output's gradient to; None: taken unchanged
    operands: tuple[Layout | None, ...]  # the layout of each operand's gradient; None without one
    kinds: Kinds  # of the operands' gradients, filled by `Call.as_operands`


class Call:
    """Layouts and this rank's options of an op, for operands of given shapes, dtypes and layouts.

    If one operand's mesh splits axes of another operand's mesh, the op is computed on the finer mesh. For example in
    attention with more ranks than key heads, queries are on the model's mesh, and keys are on a mesh that splits the
    tp axis into one part over the heads and one over their copies. Outputs are expressed on the coarser mesh if
    possible, and each gradient on its operand's mesh. Nothing is moved between ranks.

    options: from `Sharding.local`, for forward and backward; None on ranks outside the mesh.
    outputs: layout and shape of each.
    constants, overwrites: the answers of `Op.constants` and `Op.overwrites`.
    Raises LayoutError if the op's rule cannot take the operands' layouts.
    """

    def __init__(self, op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]) -> None:
        fixed = tuple((name, value) for name, value in options.items() if name not in op.varying)
        layouts = tuple(None if tensor is None else _layout(tensor, mesh) for tensor in tensors)
        self.op = op
        self.shapes: Shapes = tuple(None if each is None else shape_of(each) for each in tensors)
        self.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        self.is_plain = tuple(not isinstance(tensor, DTensor) for tensor in tensors)
        self._layouts, self._meshes = layouts, Meshes.of(layouts)
        if self._meshes.fine != process_mesh(mesh):
            device_meshes = (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
            mesh = next((each for each in device_meshes if process_mesh(each) == self._meshes.fine), mesh)
        self.sharding: Sharding = sharding_of(op, self._meshes.refine(layouts, self.shapes), self.shapes, fixed)
        self.outputs = self._meshes.coarsen(self.sharding.outputs)
        rank = this_rank()
        self.options = self.sharding.local(rank, mesh) if rank in self.sharding.output.mesh else None
        self.constants, self.overwrites = op.constants(options), op.overwrites(options)
        self._flows: dict[Any, Flow] = {}
        self._kinds: Kinds = {}

    @classmethod
    def of(cls, op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]) -> Call:
        """Return the cached call for operands of these kinds, made if missing. Raises as the constructor."""
        if is_compiling():  # not cached: sizes may be symbolic
            return cls(op, tensors, mesh, options)
        parts: list[Any] = [op]
        for tensor in tensors:
            if tensor is None:
                parts.append(None)
            elif isinstance(tensor, DTensor):
                parts.append(dtensor_spec(tensor))
            else:
                parts.append((tensor.shape, tensor.dtype))
        for item in options.items():
            if item[0] not in op.varying:
                parts.append(item)
        cache, key = world_cache(), tuple(parts)
        call = cache.get(key)
        if call is None:
            call = cache[key] = cls(op, tensors, mesh, options)
        found: Call = call
        return found

    def flow(self, grads: Sequence[DTensor | None]) -> Flow:
        """The `Flow` for these output gradients. Raises LayoutError if the op's rule cannot take their layouts."""
        if is_compiling():
            return self._flow(grads)
        key = tuple(None if grad is None else dtensor_spec(grad) for grad in grads)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = self._flow(grads)
        return flow

    def _flow(self, grads: Sequence[DTensor | None]) -> Flow:
        outputs = [layout for layout, _ in self.outputs]
        arrived = [None if grad is None else layout_of(grad) for grad in grads]
        sliced = tuple(
            None if grad is None or layout is None else sliced_layout(layout, output, shape_of(grad), grad.dtype)
            for grad, layout, output in zip(grads, arrived, outputs, strict=True)
        )
        taken = (cut or layout for cut, layout in zip(sliced, arrived, strict=True))
        return Flow(sliced, self.gradients(*taken), {})

    def output(self, i: int, part: Tensor) -> DTensor:
        """Wrap `part`, this rank's local tensor, as output i."""
        key = i, part.dtype
        kind = self._kinds.get(key)
        if kind is not None:
            return wrap_with_spec(part, kind)
        made = wrap(part, *self.outputs[i])
        self._kinds[key] = dtensor_spec(made)
        return made

    def gradients(self, *arrived: Layout | None) -> tuple[Layout | None, ...]:
        """Layouts of the operands' gradients, on the finer mesh. arrived: layouts of the outputs' gradients."""
        fine = self._meshes.refine(arrived, tuple(shape for _, shape in self.outputs))
        return self.sharding.gradients(*fine)

    def as_operand(self, i: int, part: Tensor, layout: Layout) -> Tensor:
        """Wrap `part`, this rank's part of operand i's gradient, as the operand is: a DTensor or a plain tensor.

        layout: of the gradient, on the mesh of the computation. Raises as `wrap_gradient`.
        """
        shape, operand_layout = self.shapes[i], self._layouts[i]
        assert shape is not None and operand_layout is not None, "an operand that was left out has no gradient"
        if not self.is_plain[i]:
            part, layout = self._meshes.to_operand_mesh(self.op.name, part, layout, operand_layout, shape)
        return wrap_gradient(self.op, part, layout, shape, self.is_plain[i])

    def as_operands(self, parts: Sequence[Tensor | None], flow: Flow) -> list[Tensor | None]:
        """Wrap this rank's parts of all operands' gradients, as `as_operand` does."""
        gradients: list[Tensor | None] = []
        for i, (part, layout) in enumerate(zip(parts, flow.operands, strict=True)):
            if part is None or layout is None or (self.options is None and self.is_plain[i]):
                gradients.append(None)  # outside the mesh: a plain tensor has no empty part
                continue
            kind = flow.kinds.get((i, part.dtype))
            if kind is not None:
                gradients.append(wrap_with_spec(part, kind))
                continue
            gradient = self.as_operand(i, part, layout)
            gradients.append(gradient)
            operand_layout = self._layouts[i]
            # Only a part wrapped unchanged can be wrapped by kind alone.
            if isinstance(gradient, DTensor) and operand_layout is not None and operand_layout.mesh == layout.mesh:
                flow.kinds[i, part.dtype] = dtensor_spec(gradient)
        return gradients


def sliced(grad: DTensor, layout: Layout | None) -> DTensor:
    """Reshard the gradient to a layout from `sliced_layout`; each rank only slices. None: return it unchanged."""
    return grad if layout is None else reshard(grad, placements=layout)


@lru_cache(maxsize=65536)
def sliced_layout(grad: Layout, output: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Layout | None:
    """The layout of an output's gradient after sharding it like the output.

    Changes the axes where the gradient is replicated and the output is sharded. None if there is no such axis, if
    slicing is not enough, or if the meshes differ.
    For a sharded output torch's own ops may give a replicated gradient, for example the gradient of a mean.
    """
    if grad == output or grad.mesh != output.mesh:
        return None
    replicated = {
        axis for axis in grad.mesh.axis_names if grad[axis] == Replicate() and isinstance(output[axis], Shard)
    }
    wanted = output.replace(**{axis: grad[axis] for axis in grad.mesh.axis_names if axis not in replicated})
    if not replicated or any(not isinstance(step, Slice) for step in plan(grad, wanted, shape, dtype).steps):
        return None
    return wanted


def _layout(tensor: Tensor, mesh: DeviceMesh) -> Layout:
    return layout_of(tensor) if isinstance(tensor, DTensor) else _replicated(process_mesh(mesh))


_replicated = lru_cache(maxsize=65536)(Layout)


def wrap_gradient(op: Op, gradient: Tensor, layout: Layout, shape: Sequence[int], plain: bool) -> Tensor:
    """Wrap an operand's gradient as the operand is: a DTensor of `layout`, or a plain tensor if `plain`.

    Raises LayoutError for a plain operand with a gradient that is not replicated.
    """
    if not plain:
        return wrap(gradient, layout, shape)
    if set(layout.placements) == {Replicate()}:
        return gradient
    raise LayoutError(
        f"{op.name}: a plain tensor of shape {tuple(shape)} beside DTensors has a gradient with layout ({layout}), "
        f"which only a DTensor can have; make the tensor a DTensor with distribute()"
    )


class Meshes(NamedTuple):
    """The two meshes of an op's operands. Made by `Meshes.of`; both are the same if all operands are on one mesh."""

    fine: ProcessMesh  # with the most axes; the op is computed on it
    coarse: ProcessMesh  # with the fewest axes

    @classmethod
    def of(cls, layouts: Layouts) -> Meshes:
        """The meshes of these operands' layouts.

        If the meshes do not split one another, both are the first mesh, and `sharding_of` raises LayoutError.
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
        If the gradient is Partial(sum) over one part of a coarse axis and replicated over another, it becomes
        Partial(sum) over the whole axis; ranks with a coordinate above 0 on the replicated part contribute zeros.
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
