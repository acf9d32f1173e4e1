"""Runs an `Op` on plain tensors and on DTensors: one unwrap, the local computation, one wrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Replicate, Shard, infer
from weft.mesh.infer.terms import one_mesh
from weft.reshard import Slice, layout_of, plan, reshard
from weft.reshard.running.dtensor import wrap
from weft.reshard.running.groups import of_this_world, process_mesh, this_rank

from ..op import OPS, Op, Tensors

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """What a rule answers: how the output lies, how the gradients lie, and what differs between ranks."""

    output: Layout
    shape: tuple[int, ...]  # of the global output
    gradients: Callable[..., tuple[Layout | None, ...]]  # from the layouts in which the outputs' gradients arrive
    local: Callable[[int, DeviceMesh], dict[str, Any]] = lambda rank, mesh: {}  # options of a rank's forward: kept
    # Layout and shape of each further output; None where the op's output is no tuple.
    more: tuple[tuple[Layout, tuple[int, ...]], ...] | None = None

    @property
    def outputs(self) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Layout and shape of each output."""
        return (self.output, self.shape), *(self.more or ())


def apply(op: Op, *tensors: Tensor | None, **options: Any) -> Tensor:
    """The op's output: a plain tensor from plain tensors, a DTensor where one of them is. A plain tensor beside a
    DTensor counts as replicated.

    options: hashable values.
    Raises LayoutError where the op's rule does not take the layouts.
    """
    output: Tensor = _run(op, tensors, options)[0]
    return output


def apply_many(op: Op, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """`apply` for an op of several outputs."""
    outputs: tuple[Tensor, ...] = _run(op, tensors, options)[:-1]
    return outputs


def _run(op: Op, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """The outputs and their `anchor`."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None:
        if op.backward is None:
            return op.forward(*tensors, **options), None
        return _Plain.apply(op, options, *tensors)  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling():
        return _in_graph(op.name, tuple(options.items()), *tensors), None
    return _on_mesh(op, mesh, tensors, options)


def _on_mesh(op: Op, mesh: DeviceMesh, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """`_run` on DTensors."""
    shapes, sharding = sharding_of(op, tensors, mesh, options)
    local = on_this_rank(sharding, mesh)
    if op.backward is None and local is not None:
        layouts: list[Layout | None] = []
        parts = _ToLocal.apply(op, layouts, shapes, *tensors)  # type: ignore[no-untyped-call]
        output = op.forward(*parts, **options, **local)
        return _FromLocal.apply(sharding, layouts, output), None  # type: ignore[no-untyped-call]
    return _Sharded.apply(op, options, sharding, shapes, local, *tensors)  # type: ignore[no-untyped-call]


@torch.compiler.allow_in_graph
def _in_graph(name: str, options: tuple[tuple[str, Any], ...], *tensors: Tensor | None) -> Any:
    """An op on DTensors where torch.compile traces: a node of Dynamo's graph, which what traces that graph sees through.

    Dynamo itself would have to know the layout of each gradient before there is one.
    """
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return _on_mesh(OPS[name], mesh, tensors, dict(options))[0]


def sharding_of(
    op: Op, tensors: Sequence[Tensor | None], mesh: DeviceMesh, options: dict[str, Any]
) -> tuple[Shapes, Sharding]:
    """The operands' shapes, and what the op's rule answers. Raises LayoutError where it does not take how they lie."""
    layouts = tuple(None if tensor is None else _layout(tensor, mesh) for tensor in tensors)
    shapes = tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors)
    fixed = tuple((name, value) for name, value in options.items() if name not in op.varying)
    return shapes, _sharding(op, layouts, shapes, fixed)


def _layout(tensor: Tensor, mesh: DeviceMesh) -> Layout:
    return layout_of(tensor) if isinstance(tensor, DTensor) else _replicated(process_mesh(mesh))


_replicated = lru_cache(maxsize=65536)(Layout)


@lru_cache(maxsize=65536)
def _sharding(op: Op, layouts: tuple[Layout | None, ...], shapes: Shapes, options: tuple[Any, ...]) -> Sharding:
    one_mesh([layout for layout in layouts if layout is not None], op.name)
    answer: Sharding = op.rule(layouts, shapes, dict(options))
    return answer


def on_this_rank(sharding: Sharding, mesh: DeviceMesh) -> dict[str, Any] | None:
    """The options of this rank's forward; None outside the mesh."""
    kept, key = of_this_world(), (sharding, mesh)  # the options may hold process groups
    if key not in kept:
        rank = this_rank()
        kept[key] = sharding.local(rank, mesh) if rank in sharding.output.mesh else None
    options: dict[str, Any] | None = kept[key]
    return options


def independent(output: Layout, layouts: tuple[Layout | None, ...]) -> Callable[[Layout], tuple[Layout | None, ...]]:
    """The `gradients` of an op whose local parts are computed independently of one another."""
    operands = tuple(layout for layout in layouts if layout is not None)
    return lambda grad: tuple(
        None if layout is None else infer.gradient(output, grad, layout, operands) for layout in layouts
    )


def anchor(saved: Tensors) -> Tensor | None:
    """One more output of a function, empty, which it saves last: in backward it leads to the operands, see `first_order`.

    None where nothing is saved: of the operands the gradients are constants then.
    """
    return torch.empty(0) if saved and not torch.compiler.is_compiling() else None


def first_order(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """A backward that is not differentiated: what it returns raises where that is asked for, of any tensor.

    Its function has an `anchor` as its last output. Autograd visits only what leads to the tensors that it is asked for, so the
    gradients that are returned lead to the operands, by the anchor, and to the gradients that arrived. torch's
    `once_differentiable` lets such a question pass, as if the gradients were constants.
    """

    def once(ctx: Any, *grads: Tensor | None) -> Tensors:
        arrived = grads[:-1]
        if all(grad is None for grad in arrived):  # they are zeros, and so is what is asked for
            return (None,) * len(ctx.needs_input_grad)
        if not torch.is_grad_enabled():
            return backward(ctx, *arrived)
        with torch.no_grad():
            found = backward(ctx, *arrived)
        return found if torch.compiler.is_compiling() else _refusing(found, ctx.saved_tensors[-1], *arrived)

    return once


def _refusing(found: Sequence[Tensor | None], *sources: Tensor | None) -> Tensors:
    """The gradients that a backward found, which lead to `sources`, and raise where they are differentiated."""
    return tuple(_Last.apply(each, *sources) if isinstance(each, Tensor) else each for each in found)  # type: ignore[no-untyped-call]


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        raise RuntimeError("the ops of weft.kernels have no second derivative; use torch's own where you need one")


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        output, saved = op.forward(*tensors, **options)
        ctx.op, ctx.options, ctx.many = op, options, isinstance(output, tuple)
        ctx.set_materialize_grads(not ctx.many)
        last = anchor(saved)
        ctx.save_for_backward(*saved, last)
        return (*output, last) if ctx.many else (output, last)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        grad = grads if ctx.many else grads[0]
        return None, None, *ctx.op.backward(ctx.saved_tensors[:-1], grad, ctx.needs_input_grad[2:], **ctx.options)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: Op,
        options: dict[str, Any],
        sharding: Sharding,
        shapes: Shapes,
        local: dict[str, Any] | None,
        *tensors: Tensor | None,
    ) -> Any:
        locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        ctx.inside, ctx.shapes = local is not None, shapes
        ctx.plain = [not isinstance(tensor, DTensor) for tensor in tensors]
        ctx.op, ctx.sharding = op, sharding
        ctx.overwritten = tensors[0] if op.overwrites(options) else None
        saved: Tensors = ()
        if local is None:
            ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
            like = next(t for t in locals_ if t is not None and t.is_floating_point())
            output: Any = like.new_empty(0, dtype=op.dtype(like.dtype))
            if sharding.more is not None:
                output = (output, *(output.clone() for _ in sharding.more))
        else:
            ctx.options = {**options, **local}
            output, saved = op.forward(*locals_, **ctx.options)
        last = anchor(saved)
        ctx.save_for_backward(*saved, last)
        ctx.set_materialize_grads(sharding.more is None)
        if sharding.more is None:
            return wrap(output, sharding.output, sharding.shape), last
        lying = zip(output, sharding.outputs, strict=True)
        return *(wrap(part, layout, shape) for part, (layout, shape) in lying), last

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: DTensor | None) -> Tensors:
        needed = ctx.needs_input_grad[5:]
        grads = tuple(
            None if grad is None else _sliced(grad, layout)
            for grad, (layout, _) in zip(grads, ctx.sharding.outputs, strict=True)
        )
        layouts = ctx.sharding.gradients(*(None if grad is None else layout_of(grad) for grad in grads))
        locals_ = tuple(None if grad is None else grad.to_local() for grad in grads)
        if ctx.inside:
            local = locals_[0] if ctx.sharding.more is None else locals_
            parts = ctx.op.backward(ctx.saved_tensors[:-1], local, needed, **ctx.options)
            if ctx.overwritten is not None:
                torch.autograd.graph.increment_version(ctx.overwritten)  # the local tensor's own is not looked at
        else:
            like = next(local for local in locals_ if local is not None)
            dtypes = zip(ctx.dtypes, needed, strict=True)
            parts = [like.new_empty(0, dtype=dtype) if need else None for dtype, need in dtypes]
        return None, None, None, None, None, *_as_operands(ctx, parts, layouts)


class _ToLocal(torch.autograd.Function):
    """The parts of an op that torch differentiates. Its dual is `_FromLocal`."""

    @staticmethod
    def forward(
        ctx: Any, op: Op, layouts: list[Layout | None], shapes: Shapes, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """layouts: of the operands' gradients, filled in before backward comes here."""
        ctx.op, ctx.layouts, ctx.shapes, ctx.inside = op, layouts, shapes, True
        ctx.plain = [not isinstance(tensor, DTensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        return tuple(None if local is None else local.detach() for local in locals_)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> Tensors:
        with torch.no_grad():
            gradients = _as_operands(ctx, parts, ctx.layouts)
        return None, None, None, *(_refusing(gradients, *parts) if torch.is_grad_enabled() else gradients)


class _FromLocal(torch.autograd.Function):
    """The output of an op that torch differentiates. Its dual is `_ToLocal`."""

    @staticmethod
    def forward(ctx: Any, sharding: Sharding, layouts: list[Layout | None], output: Tensor) -> DTensor:
        ctx.sharding, ctx.layouts = sharding, layouts
        return wrap(output.detach(), sharding.output, sharding.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Tensors:
        with torch.no_grad():
            taken = _sliced(grad, ctx.sharding.output)
            ctx.layouts[:] = ctx.sharding.gradients(layout_of(taken))
            part = taken.to_local()
        return None, None, *(_refusing((part,), grad) if torch.is_grad_enabled() else (part,))


def _sliced(grad: DTensor, output: Layout) -> DTensor:
    """An output's gradient as the output lies, where all that it takes is to leave something out.

    torch's own ops give the gradient of a sharded tensor whole: that of a mean, for one.
    """
    wanted = _sliced_layout(layout_of(grad), output, tuple(grad.shape), grad.dtype)
    return grad if wanted is None else reshard(grad, placements=wanted)


@lru_cache(maxsize=65536)
def _sliced_layout(grad: Layout, output: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Layout | None:
    """None where the gradient is taken as it is."""
    if grad == output or grad.mesh != output.mesh:
        return None
    whole = {axis for axis in grad.mesh.axis_names if grad[axis] == Replicate() and isinstance(output[axis], Shard)}
    wanted = output.replace(**{axis: grad[axis] for axis in grad.mesh.axis_names if axis not in whole})
    if not whole or any(not isinstance(step, Slice) for step in plan(grad, wanted, shape, dtype).steps):
        return None
    return wanted


def _as_operands(ctx: Any, parts: Sequence[Tensor | None], layouts: Sequence[Layout | None]) -> list[Tensor | None]:
    """The gradients of an op's operands, from this rank's parts of them."""
    gradients: list[Tensor | None] = []
    for part, layout, shape, plain in zip(parts, layouts, ctx.shapes, ctx.plain, strict=True):
        if part is None or layout is None or (plain and not ctx.inside):  # a plain tensor has no empty part
            gradients.append(None)
        else:
            gradients.append(laid(ctx.op, part, layout, shape, plain))
    return gradients


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
