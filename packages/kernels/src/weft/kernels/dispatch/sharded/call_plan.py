"""`CallPlan`: what an op's calls have in common, if the operands' shapes, dtypes and layouts are the same from call to
call, and the options as well, apart from `Op.varying`.

Made at the first of these calls, and cached until the process groups end; inside `exact_sums` once more for each named
mesh. While torch.compile traces, plans are not cached.
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
from weft.reshard.extension import (
    NAMED,
    Fold,
    dtensor_spec,
    named_axes_key,
    process_mesh,
    shape_of,
    this_rank,
    world_cache,
    wrap,
    wrap_with_spec,
)

from ..backend import is_compiling
from ..op import Op
from .folded import FoldedCall
from .rules import Layouts, Shapes, Sharding, sharding_of

# Cached DTensor specs of outputs or gradients, by (position, dtype): wrapping by a spec does not look up the layout.
Specs = dict[tuple[int, torch.dtype], Any]


class GradientLayouts(NamedTuple):
    """The layouts in a backward of an op. Made and cached by `CallPlan.gradient_layouts`."""

    # The layout which each output's gradient is sliced to before backward; None to leave the gradient as given.
    slices: tuple[Layout | None, ...]
    # The layout of each operand's gradient, on the mesh of the computation; None for an operand without a gradient.
    operands: tuple[Layout | None, ...]
    # The layouts of the outputs' gradients after slicing, on the mesh of the op's rule (see `CallPlan._rule_layouts`).
    # Used inside `exact_sums` alone: the argument `grad_layouts` of `FoldedCall.backward`.
    rule: tuple[Layout | None, ...]
    specs: Specs  # of the operands' gradients, filled by `CallPlan.wrap_gradients`


class CallPlan:
    """How an op runs on operands of given shapes, dtypes and layouts, with given options.

    Made once by `find`, and used by all calls with these operands and options.

    Operands may be on different meshes, if the finest mesh splits the axes of all further meshes. The op is then
    computed on the finest mesh. Attention with more ranks than key heads is an example: the queries are on the model's
    mesh, and the keys on a mesh with two axes in place of tp. The first axis shards the heads; over the second axis,
    each head is replicated. Outputs are expressed on the coarsest mesh if possible, and each gradient on the operand's
    mesh. Nothing is moved between ranks.
    """

    def __init__(self, op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]) -> None:
        """mesh: of any DTensor among `tensors`. Raises LayoutError if the op's rule cannot take the layouts."""
        fixed_options = tuple((name, value) for name, value in options.items() if name not in op.varying)
        layouts = tuple(None if tensor is None else _layout(tensor, mesh) for tensor in tensors)
        self.op = op
        self.shapes: Shapes = tuple(None if each is None else shape_of(each) for each in tensors)
        self.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        self.is_plain = tuple(not isinstance(tensor, DTensor) for tensor in tensors)
        self._layouts, self._meshes = layouts, Meshes.of_layouts(layouts)
        if self._meshes.fine != process_mesh(mesh):
            device_meshes = (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
            mesh = next((each for each in device_meshes if process_mesh(each) == self._meshes.fine), mesh)
        fine = self._meshes.refine(layouts, self.shapes)
        rank = this_rank()
        self.is_in_mesh = rank in self._meshes.fine  # whether this rank computes
        # Inside `exact_sums`: for which coordinates of the named mesh each rank stands. None outside.
        self._fold = Fold.of(self._meshes.fine)
        # Inside `exact_sums`: runs the op for each of this rank's coordinates. None outside, and on a rank outside the
        # mesh.
        self.folded: FoldedCall | None = None
        # The options of forward and backward from `Sharding.local_options`; empty inside `exact_sums`, and on a rank
        # outside the mesh.
        self.local_options: dict[str, Any] = {}
        if self._fold is None:
            self.sharding: Sharding = sharding_of(op, fine, self.shapes, fixed_options)
            outputs = self.sharding.outputs
            if self.is_in_mesh:
                self.local_options = self.sharding.local_options(rank, mesh)
        else:
            named = tuple(None if layout is None else self._fold.to_named(layout) for layout in fine)
            self.sharding = sharding_of(op, named, self.shapes, fixed_options)
            outputs = tuple((self._fold.from_named(layout), shape) for layout, shape in self.sharding.outputs)
            if self.is_in_mesh:
                self.folded = FoldedCall(op, self._fold, mesh, self.sharding, named, self.shapes)
        self.outputs = self._meshes.coarsen(outputs)  # layout and global shape of each output
        self.num_constants = op.num_constants(options)  # how many of the last outputs have no gradient
        # Whether backward writes the first operand's gradient into the operand's memory.
        self.overwrites = op.overwrites(options)
        self._gradient_layouts: dict[Any, GradientLayouts] = {}
        self._specs: Specs = {}  # of the outputs

    @classmethod
    def find(cls, op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]) -> CallPlan:
        """The plan for operands of these shapes, dtypes and layouts, and for these options: from the cache, or made.

        Called for each call of an op on DTensors: by `_run_on_mesh`, and by `TracedOperands.unwrap` while the compiler
        traces a custom op. Raises LayoutError as the constructor does.
        """
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
        if NAMED.axes is not None:
            parts.append(named_axes_key())
        cache, key = world_cache(), tuple(parts)
        plan: CallPlan | None = cache.get(key)
        if plan is None:
            plan = cache[key] = cls(op, tensors, mesh, options)
        return plan

    def gradient_layouts(self, grads: Sequence[DTensor | None]) -> GradientLayouts:
        """The layouts in a backward with these output gradients. Called by the backward of `ShardedOp` and `FromLocal`.

        Raises LayoutError if the op's rule refuses the gradients' layouts.
        """
        if is_compiling():
            return self._find_gradient_layouts(grads)
        key = tuple(None if grad is None else dtensor_spec(grad) for grad in grads)
        layouts = self._gradient_layouts.get(key)
        if layouts is None:
            layouts = self._gradient_layouts[key] = self._find_gradient_layouts(grads)
        return layouts

    def _find_gradient_layouts(self, grads: Sequence[DTensor | None]) -> GradientLayouts:
        outputs = [layout for layout, _ in self.outputs]
        layouts = [None if grad is None else layout_of(grad) for grad in grads]
        slices = tuple(
            None if grad is None or layout is None else find_slice_layout(layout, output, shape_of(grad), grad.dtype)
            for grad, layout, output in zip(grads, layouts, outputs, strict=True)
        )
        after_slicing = tuple(wanted or layout for wanted, layout in zip(slices, layouts, strict=True))
        return GradientLayouts(
            slices, self.operand_gradient_layouts(*after_slicing), self._rule_layouts(after_slicing), {}
        )

    def operand_gradient_layouts(self, *layouts: Layout | None) -> tuple[Layout | None, ...]:
        """Layouts of the operands' gradients, on the mesh of the computation. layouts: of the outputs' gradients.

        Called by `gradient_layouts`, and by `TracedOperands.gradient_layouts` in a custom op under torch.compile.
        Raises LayoutError as the op's rule.
        """
        found = self.sharding.gradient_layouts(*self._rule_layouts(layouts))
        if self._fold is None:
            return found
        return tuple(None if each is None else self._fold.from_named(each) for each in found)

    def _rule_layouts(self, layouts: Layouts) -> Layouts:
        """Layouts of the outputs' gradients on the mesh of the op's rule.

        Inside `exact_sums`, this is the mesh named by `exact_sums`; outside, the finest of the operands' meshes.
        """
        fine = self._meshes.refine(layouts, tuple(shape for _, shape in self.outputs))
        if self._fold is None:
            return fine
        return tuple(None if each is None else self._fold.to_named(each) for each in fine)

    def wrap_output(self, i: int, local: Tensor) -> DTensor:
        """Make the DTensor of output i from this rank's local tensor. Called at the end of forward."""
        key = i, local.dtype
        spec = self._specs.get(key)
        if spec is not None:
            return wrap_with_spec(local, spec)
        output = wrap(local, *self.outputs[i])
        self._specs[key] = dtensor_spec(output)
        return output

    def wrap_gradient(self, i: int, local: Tensor, layout: Layout) -> Tensor:
        """Make the gradient of operand i, a DTensor or a plain tensor like the operand, from this rank's local tensor.

        Called by `wrap_gradients` if no spec is cached. layout: of the gradient, on the mesh of the computation.
        Raises LayoutError: for a DTensor as `Meshes.to_operand_mesh`, for a plain operand as `wrap_as_operand`.
        """
        shape, operand_layout = self.shapes[i], self._layouts[i]
        assert shape is not None and operand_layout is not None, "an operand that was left out has no gradient"
        if not self.is_plain[i]:
            local, layout = self._meshes.to_operand_mesh(self.op.name, local, layout, operand_layout, shape)
        return wrap_as_operand(self.op, local, layout, shape, self.is_plain[i])

    def wrap_gradients(self, locals_: Sequence[Tensor | None], layouts: GradientLayouts) -> list[Tensor | None]:
        """`wrap_gradient` for all operands. Called once `ShardedOp` or `ToLocal` has the local gradients in backward.

        locals_: this rank's local gradients. Returns None for an operand without a gradient.
        Also None for a plain operand on a rank outside the mesh: the gradient is empty there, and a plain operand's
        gradient must have the operand's shape.
        """
        gradients: list[Tensor | None] = []
        for i, (local, layout) in enumerate(zip(locals_, layouts.operands, strict=True)):
            if local is None or layout is None or (self.is_plain[i] and not self.is_in_mesh):
                gradients.append(None)
                continue
            spec = layouts.specs.get((i, local.dtype))
            if spec is not None:
                gradients.append(wrap_with_spec(local, spec))
                continue
            gradient = self.wrap_gradient(i, local, layout)
            gradients.append(gradient)
            operand_layout = self._layouts[i]
            # On another mesh `to_operand_mesh` may change the local tensor, which wrapping by the spec would not do.
            if isinstance(gradient, DTensor) and operand_layout is not None and operand_layout.mesh == layout.mesh:
                layouts.specs[i, local.dtype] = dtensor_spec(gradient)
        return gradients


def slice_gradient(grad: DTensor, layout: Layout | None) -> DTensor:
    """Reshard an output's gradient to `layout`, the result of `find_slice_layout`: each rank slices.

    Called at the start of the backward of `ShardedOp` and `FromLocal`, and of autograd functions of
    `weft.models.parallel`. Communication: none.
    """
    return grad if layout is None else reshard(grad, placements=layout)


@lru_cache(maxsize=65536)
def find_slice_layout(layout: Layout, output: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Layout | None:
    """The layout to slice an output's gradient to: sharded as the output on axes where the gradient is replicated.

    Called where a backward receives a gradient, before `slice_gradient`.
    torch's own ops may give a replicated gradient for a sharded output, for example the gradient of a mean.
    layout: of the gradient. output: the output's layout. shape, dtype: of the gradient.
    Returns None to leave the gradient as given: if no axis is to be sliced, if the meshes differ, or if the reshard
    would need communication.
    """
    if layout == output or layout.mesh != output.mesh:
        return None
    replicated = {
        axis for axis in layout.mesh.axis_names if layout[axis] == Replicate() and isinstance(output[axis], Shard)
    }
    wanted = output.replace(**{axis: layout[axis] for axis in layout.mesh.axis_names if axis not in replicated})
    if not replicated or any(not isinstance(step, Slice) for step in plan(layout, wanted, shape, dtype).steps):
        return None
    return wanted


def _layout(tensor: Tensor, mesh: DeviceMesh) -> Layout:
    """The tensor's layout. A plain tensor counts as replicated over `mesh`."""
    return layout_of(tensor) if isinstance(tensor, DTensor) else _replicated(process_mesh(mesh))


_replicated = lru_cache(maxsize=65536)(Layout)  # a Layout made of a mesh alone is replicated on every axis


def wrap_as_operand(op: Op, local: Tensor, layout: Layout, shape: Sequence[int], is_plain: bool) -> Tensor:
    """Make an operand's gradient from a local tensor: a DTensor of `layout`, or a plain tensor if `is_plain`.

    Called by `CallPlan.wrap_gradient`, and by `TracedOperands.wrap_gradient` in a custom op under torch.compile.
    layout, shape: of the gradient; the shape is global.
    Raises LayoutError for a plain operand with a gradient that is not replicated.
    """
    if not is_plain:
        return wrap(local, layout, shape)
    if set(layout.placements) == {Replicate()}:
        return local
    raise LayoutError(
        f"{op.name}: a plain tensor of shape {tuple(shape)} beside DTensors has a gradient with layout ({layout}), "
        f"which only a DTensor can have; make the tensor a DTensor with distribute()"
    )


class Meshes(NamedTuple):
    """The finest and the coarsest of the operands' meshes. Both are the same if all operands are on one mesh."""

    fine: ProcessMesh  # with the most axes; the op is computed on it
    coarse: ProcessMesh  # with the fewest axes; outputs are expressed on it if possible

    @classmethod
    def of_layouts(cls, layouts: Layouts) -> Meshes:
        """The meshes of these operands' layouts.

        If the finest mesh does not split the axes of every further mesh, returns the first mesh twice; `sharding_of`
        then raises LayoutError.
        """
        meshes = list(dict.fromkeys(layout.mesh for layout in layouts if layout is not None))
        fine, coarse = max(meshes, key=lambda mesh: mesh.ndim), min(meshes, key=lambda mesh: mesh.ndim)
        if len(meshes) > 1 and all(parts_of_axes(fine, mesh) for mesh in meshes):
            return cls(fine, coarse)
        return cls(meshes[0], meshes[0])

    def refine(self, layouts: Layouts, shapes: Shapes) -> Layouts:
        """Express layouts of operands, or of outputs' gradients, on the fine mesh. shapes: the tensors' global shapes.

        Called before the op's rule is asked: for forward and for backward.
        Raises LayoutError for uneven shards.
        """
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
        self, name: str, local: Tensor, layout: Layout, operand_layout: Layout, shape: tuple[int, ...]
    ) -> tuple[Tensor, Layout]:
        """Express an operand's gradient on the operand's own mesh. Returns this rank's local tensor and the layout.

        Called by `CallPlan.wrap_gradient` for a DTensor operand.
        name: of the op. local, layout, shape: of the gradient.
        An axis of the operand's mesh may be split into several axes of the gradient's mesh, some with Partial(sum) and
        some replicated. The operand's mesh cannot express this mixture, and the gradient becomes Partial(sum) over the
        operand's axis. Each addend must count once: ranks at coordinate 0 of the replicated axes contribute the local
        tensor, and all further ranks contribute zeros.
        Raises LayoutError if the operand's mesh cannot express the layout.
        """
        if layout.mesh == operand_layout.mesh:
            return local, layout
        coarse = coarsened(layout, operand_layout.mesh, shape)
        if coarse is not None:
            return local, coarse
        partial, were_replicated = _replicated_to_partial(layout, operand_layout.mesh)
        coarse = coarsened(partial, operand_layout.mesh, shape)
        if coarse is None:
            raise LayoutError(
                f"{name}: the gradient of an operand on {operand_layout.mesh} has layout ({layout}), which the "
                f"operand's mesh cannot express; reshard the operand to {self.fine} first"
            )
        coordinate = layout.mesh.coordinate(this_rank()) or {}
        return (torch.zeros_like(local) if any(coordinate.get(axis, 0) for axis in were_replicated) else local), coarse


def _replicated_to_partial(layout: Layout, coarse: ProcessMesh) -> tuple[Layout, list[str]]:
    """Replace Replicate() by Partial(sum) on axes which split an axis of `coarse` together with a Partial(sum) axis.

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
