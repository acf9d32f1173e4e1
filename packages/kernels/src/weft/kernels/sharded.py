"""Runs an `Op` on plain tensors and on DTensors: one unwrap, the local computation, one wrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Replicate, infer
from weft.reshard import layout_of
from weft.reshard.dtensor import wrap
from weft.reshard.groups import this_rank

from .op import Op, Tensors

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a rule answers: how the output lies, how the gradients lie, and what differs between ranks."""

    output: Layout
    shape: tuple[int, ...]  # of the global output
    gradients: Callable[[Layout], tuple[Layout | None, ...]]  # from the layout in which the output's gradient arrives
    local: Callable[[int, DeviceMesh], dict[str, Any]] = lambda rank, mesh: {}  # options of this rank's forward


def apply(op: Op, *tensors: Tensor | None, **options: Any) -> Tensor:
    """The op's output: a plain tensor from plain tensors, a DTensor where one of them is. A plain tensor beside a
    DTensor counts as replicated.

    options: hashable values.
    Raises LayoutError where the op's rule does not take the layouts.
    """
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return _Plain.apply(op, options, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    whole = Layout(next(layout_of(tensor).mesh for tensor in tensors if isinstance(tensor, DTensor)))
    layouts = tuple(
        layout_of(tensor) if isinstance(tensor, DTensor) else None if tensor is None else whole for tensor in tensors
    )
    shapes = tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors)
    fixed = tuple((name, value) for name, value in options.items() if name not in op.varying)
    sharding = _sharding(op, layouts, shapes, fixed)
    return _Sharded.apply(op, options, sharding, layouts, mesh, *tensors)  # type: ignore[no-any-return, no-untyped-call]


@lru_cache(maxsize=65536)
def _sharding(op: Op, layouts: tuple[Layout | None, ...], shapes: Shapes, options: tuple[Any, ...]) -> Sharding:
    first, *others = {layout.mesh: None for layout in layouts if layout is not None}
    if others:
        raise LayoutError(
            f"{op.name}: operands lie on different meshes: {first} and {others[0]}; reshard one to the other"
        )
    answer: Sharding = op.rule(layouts, shapes, dict(options))
    return answer


def independent(output: Layout, layouts: tuple[Layout | None, ...]) -> Callable[[Layout], tuple[Layout | None, ...]]:
    """The `gradients` of an op whose local parts are computed independently of one another."""
    operands = tuple(layout for layout in layouts if layout is not None)
    return lambda grad: tuple(
        None if layout is None else infer.gradient(output, grad, layout, operands) for layout in layouts
    )


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, options: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        output, saved = op.forward(*tensors, **options)
        ctx.op, ctx.options = op, options
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        return None, None, *ctx.op.backward(ctx.saved_tensors, grad, ctx.needs_input_grad[2:], **ctx.options)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: Op,
        options: dict[str, Any],
        sharding: Sharding,
        layouts: tuple[Layout | None, ...],
        mesh: DeviceMesh,
        *tensors: Tensor | None,
    ) -> DTensor:
        locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        ctx.inside = this_rank() in sharding.output.mesh
        ctx.shapes = [None if tensor is None else tensor.shape for tensor in tensors]
        ctx.plain = [not isinstance(tensor, DTensor) for tensor in tensors]
        ctx.op, ctx.sharding = op, sharding
        if not ctx.inside:
            ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
            like = next(t for t in locals_ if t is not None and t.is_floating_point())
            return wrap(like.new_empty(0, dtype=op.dtype(like.dtype)), sharding.output, sharding.shape)
        ctx.options = {**options, **sharding.local(this_rank(), mesh)}
        output, saved = op.forward(*locals_, **ctx.options)
        ctx.save_for_backward(*saved)
        return wrap(output, sharding.output, sharding.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> Tensors:
        needed = ctx.needs_input_grad[5:]
        layouts = ctx.sharding.gradients(layout_of(grad))
        local = grad.to_local()
        parts = (
            ctx.op.backward(ctx.saved_tensors, local, needed, **ctx.options)
            if ctx.inside
            else [
                local.new_empty(0, dtype=dtype) if need else None
                for dtype, need in zip(ctx.dtypes, needed, strict=True)
            ]
        )
        gradients: list[Tensor | None] = []
        for part, layout, shape, plain in zip(parts, layouts, ctx.shapes, ctx.plain, strict=True):
            if part is None or layout is None:
                gradients.append(None)
            elif not plain:
                gradients.append(wrap(part, layout, shape))
            elif set(layout.placements) == {Replicate()}:
                gradients.append(part if ctx.inside else None)  # a plain tensor has no empty part
            else:
                raise LayoutError(
                    f"{ctx.op.name}: a plain tensor of shape {tuple(shape)} beside DTensors has a gradient that is "
                    f"({layout}); give it a layout with distribute(), so that its gradient can say so"
                )
        return None, None, None, None, None, *gradients
