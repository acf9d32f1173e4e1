"""An op on operands of one kind: found once, and kept as long as the process groups that it may hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Replicate, Shard
from weft.reshard import Slice, layout_of, plan, reshard
from weft.reshard.running.dtensor import kind_of, of_kind, shape_of, wrap
from weft.reshard.running.groups import of_this_world, process_mesh, this_rank

from ..backend import is_compiling
from ..op import Op
from .meshes import Meshes
from .rules import Shapes, Sharding, sharding_of

Kinds = dict[tuple[int, torch.dtype], Any]  # `kind_of` what was made, by its position: a layout takes longer to look up


class Flow(NamedTuple):
    """How gradients go through an op. sliced: what a gradient that arrived is cut to, None for those that are taken as they
    are. operands: the layout of each operand's gradient, None where it has none. kinds: see `Call.as_operands`."""

    sliced: tuple[Layout | None, ...]
    operands: tuple[Layout | None, ...]
    kinds: Kinds


class Call:
    """An op on operands that lie alike, on this rank.

    Where some operands lie on a mesh and others on one whose axes are parts of its axes, the op is computed on the latter, by
    its rule; an output, and a gradient, is of the mesh with fewer axes where that can say how it lies. Nothing moves for it.
    options: what the op's rule gives this rank's forward; None outside the mesh. outputs: layout and shape of each.
    Raises LayoutError where the rule does not take how the operands lie.
    """

    def __init__(self, op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]) -> None:
        fixed = tuple((name, value) for name, value in options.items() if name not in op.varying)
        layouts = tuple(None if tensor is None else _layout(tensor, mesh) for tensor in tensors)
        self.op = op
        self.shapes: Shapes = tuple(None if each is None else shape_of(each) for each in tensors)
        self.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        self.is_plain = tuple(not isinstance(tensor, DTensor) for tensor in tensors)
        self._own, self._meshes = layouts, Meshes.of(layouts)
        if self._meshes.fine != process_mesh(mesh):
            laid_out = (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
            mesh = next((own for own in laid_out if process_mesh(own) == self._meshes.fine), mesh)
        self.sharding: Sharding = sharding_of(op, self._meshes.refine(layouts, self.shapes), self.shapes, fixed)
        self.outputs = self._meshes.coarsen(self.sharding.outputs)
        rank = this_rank()
        self.options = self.sharding.local(rank, mesh) if rank in self.sharding.output.mesh else None
        self._flows: dict[Any, Flow] = {}
        self._kinds: Kinds = {}

    @classmethod
    def of(cls, op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]) -> Call:
        """The call, made once for operands of these kinds. Raises as the constructor."""
        if is_compiling():  # sizes may be symbols
            return cls(op, tensors, mesh, options)
        kept = of_this_world()
        varying = op.varying
        fixed = options.items() if not varying else [item for item in options.items() if item[0] not in varying]
        key = (op, *map(_kind, tensors), *fixed)
        call = kept.get(key)
        if call is None:
            call = kept[key] = cls(op, tensors, mesh, options)
        found: Call = call
        return found

    def flow(self, grads: Sequence[DTensor | None]) -> Flow:
        """How these gradients of the outputs go through. Raises LayoutError where the op's rule does not take them."""
        if is_compiling():
            return self._flow(grads)
        key = tuple(None if grad is None else kind_of(grad) for grad in grads)
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
        """Output i, of which this rank has `part`."""
        key = i, part.dtype
        kind = self._kinds.get(key)
        if kind is not None:
            return of_kind(part, kind)
        made = wrap(part, *self.outputs[i])
        self._kinds[key] = kind_of(made)
        return made

    def gradients(self, *arrived: Layout | None) -> tuple[Layout | None, ...]:
        """The layouts of the operands' gradients, where those of the outputs arrive so, on the mesh that the op is computed on."""
        fine = self._meshes.refine(arrived, tuple(shape for _, shape in self.outputs))
        return self.sharding.gradients(*fine)

    def as_operand(self, i: int, part: Tensor, layout: Layout) -> Tensor:
        """The gradient of operand i, as the operand is, from this rank's part of it. Raises as `laid`."""
        shape, own = self.shapes[i], self._own[i]
        assert shape is not None and own is not None, "only what is given has a gradient"
        if not self.is_plain[i]:
            part, layout = self._meshes.as_given(self.op.name, part, layout, own, shape)
        return laid(self.op, part, layout, shape, self.is_plain[i])

    def as_operands(self, parts: Sequence[Tensor | None], flow: Flow) -> list[Tensor | None]:
        """The gradients of the operands, from this rank's parts of them."""
        gradients: list[Tensor | None] = []
        for i, (part, layout) in enumerate(zip(parts, flow.operands, strict=True)):
            if part is None or layout is None or (self.options is None and self.is_plain[i]):
                gradients.append(None)  # a plain tensor has no empty part
                continue
            kind = flow.kinds.get((i, part.dtype))
            if kind is not None:
                gradients.append(of_kind(part, kind))
                continue
            gradient = self.as_operand(i, part, layout)
            gradients.append(gradient)
            own = self._own[i]
            if (
                isinstance(gradient, DTensor) and own is not None and own.mesh == layout.mesh
            ):  # the part is taken as it is
                flow.kinds[i, part.dtype] = kind_of(gradient)
        return gradients


def sliced(grad: DTensor, layout: Layout | None) -> DTensor:
    """The gradient cut to `layout`, which moves nothing; as it is without one."""
    return grad if layout is None else reshard(grad, placements=layout)


@lru_cache(maxsize=65536)
def sliced_layout(grad: Layout, output: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Layout | None:
    """What an output's gradient is cut to, where all that it takes is to leave something out; else None.

    torch's own ops give the gradient of a sharded tensor whole: that of a mean, for one.
    """
    if grad == output or grad.mesh != output.mesh:
        return None
    whole = {axis for axis in grad.mesh.axis_names if grad[axis] == Replicate() and isinstance(output[axis], Shard)}
    wanted = output.replace(**{axis: grad[axis] for axis in grad.mesh.axis_names if axis not in whole})
    if not whole or any(not isinstance(step, Slice) for step in plan(grad, wanted, shape, dtype).steps):
        return None
    return wanted


def _kind(tensor: Tensor | None) -> Any:
    if isinstance(tensor, DTensor):
        return kind_of(tensor)
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _layout(tensor: Tensor, mesh: DeviceMesh) -> Layout:
    return layout_of(tensor) if isinstance(tensor, DTensor) else _replicated(process_mesh(mesh))


_replicated = lru_cache(maxsize=65536)(Layout)


def laid(op: Op, gradient: Tensor, layout: Layout, shape: Sequence[int], plain: bool) -> Tensor:
    """The gradient of an operand, as the operand is. Raises LayoutError for a plain tensor whose gradient is not whole."""
    if not plain:
        return wrap(gradient, layout, shape)
    if set(layout.placements) == {Replicate()}:
        return gradient
    raise LayoutError(
        f"{op.name}: a plain tensor of shape {tuple(shape)} beside DTensors has a gradient that is ({layout}); give it a "
        f"layout with distribute(), so that its gradient can say so"
    )
