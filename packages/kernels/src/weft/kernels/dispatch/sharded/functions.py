"""The autograd functions of ops.

`Plain`: plain tensors. `Sharded`: DTensors. `ToLocal`, `FromLocal`: DTensors, for ops differentiated by torch.

`apply` and `apply_many`: run an `Op` on plain tensors and on DTensors.

Ops have no second derivatives: asking for a second derivative raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.reshard.extension import in_graph

from ..autocast import autocast_dtype, autocast_off, is_autocasting
from ..backend import is_compiling, refuse_jit_trace
from ..delayed_weight_gradients import compute_or_wait
from ..op import OPS, Op, Tensors
from ..remade_activations import mark_recomputable, replace_recomputable, restore
from .calls import Call, Flow, sliced
from .rules import Sharding


def anchor() -> Tensor:
    """An empty tensor that an autograd function outputs last and saves.

    Saved, it leads to all operands of the function. See `first_order` for its use.
    """
    return torch.empty(0)


def first_order(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Decorator for the backward of an autograd function whose last output is an `anchor`, or None.

    Differentiating the returned gradients raises RuntimeError. Autograd runs only nodes on a path to the requested
    tensors, and the request must reach a node that raises. So `refusing` links the gradients to the upstream gradients
    and to the saved tensors. If an operand that needs a gradient is not itself saved, the function saves an `anchor`.
    A function that saves nothing has gradients independent of its operands.

    torch's `once_differentiable` may let the request pass, as if the gradients were constants.
    """

    def once(ctx: Any, *grads: Tensor | None) -> Tensors:
        arrived, first = grads[:-1], None
        for grad in arrived:  # any() with a generator would cost the host more
            if grad is not None:
                first = grad
                break
        if first is None:  # all upstream gradients are zero; the results are zero too
            return (None,) * len(ctx.needs_input_grad)
        # Backward may be called inside an autocast region.
        if is_autocasting() and autocast_dtype(first) is not None and not is_compiling():
            with autocast_off(first):
                return once(ctx, *grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *arrived)
        with torch.no_grad():
            found = backward(ctx, *arrived)
        return found if is_compiling() else refusing(found, *ctx.saved_tensors, *arrived)

    return once


def refusing(found: Sequence[Tensor | None], *sources: Tensor | None) -> Tensors:
    """Link gradients to `sources`: differentiating a gradient by a source raises RuntimeError."""
    return tuple(
        _NoSecondDerivative.apply(each, *sources) if isinstance(each, Tensor) else each  # type: ignore[no-untyped-call]
        for each in found
    )


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        raise RuntimeError(
            "the ops of weft.kernels have no second derivative; use torch's own ops to differentiate twice"
        )


class Plain(torch.autograd.Function):
    """Runs an op on plain tensors. Returns the outputs and their `anchor`."""

    @staticmethod
    def forward(ctx: Any, op: Op, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        output, saved = op.forward(*tensors, **options)
        if is_compiling():
            many = isinstance(output, tuple)
            output = tuple([_unwritten(each, tensors) for each in output]) if many else _unwritten(output, tensors)
        ctx.op, ctx.options, ctx.many = op, options, isinstance(output, tuple)
        ctx.set_materialize_grads(False)
        if op.weights:
            ctx.given = [tensor is not None for tensor in tensors]
        leads = _leads(saved, tensors, ctx.needs_input_grad[2:])
        anchor_ = _save(ctx, op, saved, options, output[-1] if ctx.many else output, leads)
        if options.get("inplace") and output is tensors[0]:
            ctx.mark_dirty(output)
        if not ctx.many:
            return output, anchor_
        ctx.mark_non_differentiable(*output[len(output) - op.constants(options) :])
        return *output, anchor_

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        grad = grads if ctx.many else grads[0]
        op, options, saved, needed = ctx.op, ctx.options, _restored(ctx), ctx.needs_input_grad[2:]
        if op.epilogue_backward is not None:
            grad = op.epilogue_backward(saved, grad, needed, **options)
        if not op.weights:  # the op has no weights to delay
            return None, None, *op.backward(saved, grad, needed, **options)

        def compute(needed: Sequence[bool]) -> Tensors:
            gradients: Tensors = op.backward(saved, grad, needed, **options)
            return gradients

        return None, None, *compute_or_wait(ctx, op.weights, needed, compute)


class Sharded(torch.autograd.Function):
    """Runs an op on DTensors: unwraps, computes locally, wraps. Returns the outputs and their `anchor`.

    Also for ops without a backward, on ranks outside the mesh.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        ctx.call, ctx.overwritten = call, tensors[0] if call.overwrites else None
        if call.op.weights:
            ctx.given = [tensor is not None for tensor in tensors]
        outputs, saved, ctx.options = computed(call, options, tensors)
        anchor_ = _save(ctx, call.op, saved, ctx.options, outputs[-1].to_local(), False)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[len(outputs) - call.constants :])
        return *outputs, anchor_

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: DTensor | None) -> Tensors:
        call: Call = ctx.call
        needed = ctx.needs_input_grad[2:]
        flow = call.flow(grads)
        locals_ = tuple(
            None if grad is None else sliced(grad, cut).to_local() for grad, cut in zip(grads, flow.sliced, strict=True)
        )
        if call.options is not None:
            assert call.op.backward is not None, "ops without a backward go through ToLocal and FromLocal"
            local = locals_[0] if call.sharding.more is None else locals_
            backward, saved, options = call.op.backward, _restored(ctx), ctx.options
            if call.op.epilogue_backward is not None:
                local = call.op.epilogue_backward(saved, local, needed, **options)

            def compute(needed: Sequence[bool]) -> list[Tensor | None]:
                return call.as_operands(backward(saved, local, needed, **options), flow)

            gradients = compute_or_wait(ctx, call.op.weights, needed, compute)
            if ctx.overwritten is not None:
                # autograd looks at the DTensor's version, not at the local tensor's
                torch.autograd.graph.increment_version(ctx.overwritten)
        else:
            like = next(local for local in locals_ if local is not None)
            dtypes = zip(call.dtypes, needed, strict=True)
            parts = tuple(like.new_empty(0, dtype=dtype) if need else None for dtype, need in dtypes)
            gradients = call.as_operands(parts, flow)
        return None, None, *gradients


class ToLocal(torch.autograd.Function):
    """Unwraps the operands of an op differentiated by torch. The dual is `FromLocal`."""

    @staticmethod
    def forward(ctx: Any, call: Call, flows: list[Flow], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """flows: empty at first. `FromLocal.backward` appends the gradients' flow; `ToLocal.backward` runs later and
        reads it.
        """
        ctx.call, ctx.flows = call, flows
        ctx.set_materialize_grads(False)
        locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        parts = tuple(None if local is None else local.detach() for local in locals_)
        needed = zip(parts, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*[part for part, need in needed if part is not None and not need])
        return parts

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> Tensors:
        with torch.no_grad():
            gradients = ctx.call.as_operands(parts, ctx.flows[-1])
        return None, None, *(refusing(gradients, *parts) if torch.is_grad_enabled() else gradients)


class FromLocal(torch.autograd.Function):
    """Wraps the outputs of an op differentiated by torch. The dual is `ToLocal`."""

    @staticmethod
    def forward(ctx: Any, call: Call, flows: list[Flow], *outputs: Tensor) -> tuple[DTensor, ...]:
        ctx.call, ctx.flows = call, flows
        ctx.set_materialize_grads(False)
        made = [call.output(i, output.detach()) for i, output in enumerate(outputs)]
        ctx.mark_non_differentiable(*(each for each in made if not (each.is_floating_point() or each.is_complex())))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Tensors:
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(grads))
        with torch.no_grad():
            flow = ctx.call.flow(grads)
            ctx.flows.append(flow)
            parts = tuple(
                None if grad is None else sliced(grad, cut).to_local()
                for grad, cut in zip(grads, flow.sliced, strict=True)
            )
        return None, None, *(refusing(parts, *grads) if torch.is_grad_enabled() else parts)


def computed(
    call: Call, options: dict[str, Any], tensors: tuple[Tensor | None, ...], *, recorded: bool = True
) -> tuple[list[DTensor], Tensors, dict[str, Any]]:
    """Compute an op on DTensors. Returns the outputs, the tensors saved for backward, and the options.

    The returned options include this rank's own. recorded: whether a backward may follow.
    """
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    op, sharding = call.op, call.sharding
    saved: Tensors = ()
    if call.options is None:
        output = _nothing(op, locals_, sharding, options)
    else:
        options = {**options, **call.options} if call.options else options
        if recorded and op.backward is not None:
            output, saved = op.forward(*locals_, **options)
        else:
            output = op.infer(*locals_, **options)
    parts = (output,) if sharding.more is None else output
    return [call.output(i, part) for i, part in enumerate(parts)], saved, options


def _unwritten(output: Tensor, operands: tuple[Tensor | None, ...]) -> Tensor:
    """A view of the output, unless the output is an operand.

    Needed under torch.compile: Dynamo in torch 2.11 gives zero gradients to the operands of a function that writes
    its output in place, as kernels do, and returns it without a view.
    """
    for operand in operands:
        if operand is output:
            return output
    return output.view_as(output)


def _leads(saved: Tensors, tensors: tuple[Tensor | None, ...], needed: Sequence[bool]) -> bool:
    """Whether each operand that needs a gradient is one of the saved tensors (the same object)."""
    for tensor, need in zip(tensors, needed, strict=True):
        if need:
            for each in saved:  # loops cost the host less than generators, and `in` would compare the tensors' values
                if each is tensor:
                    break
            else:
                return False
    return True


def _save(ctx: Any, op: Op, saved: Tensors, options: dict[str, Any], output: Tensor, leads: bool) -> Tensor | None:
    """Save `saved` for backward, with recomputable tensors replaced. Returns the `anchor`, or None if none is needed.

    output: this rank's part of the last output.
    leads: from `_leads`. If True, and if no saved tensor is replaced, no anchor is needed.
    """
    if not saved or is_compiling():
        ctx.recipes = None
        ctx.save_for_backward(*saved, None)
        return None
    if op.recompute is not None and True in ctx.needs_input_grad:
        mark_recomputable(output, op, saved, options)
    tensors, ctx.recipes = replace_recomputable(saved)
    anchor_ = None if leads and not ctx.recipes else anchor()
    ctx.save_for_backward(*tensors, anchor_)
    return anchor_


def _restored(ctx: Any) -> Tensors:
    """In backward: the tensors that `_save` received."""
    tensors: Tensors = ctx.saved_tensors[:-1]
    return restore(tensors, ctx.recipes) if ctx.recipes else tensors


def _nothing(op: Op, locals_: list[Tensor | None], sharding: Sharding, options: dict[str, Any]) -> Any:
    """The empty outputs of an op on a rank outside the mesh."""
    like = next(local for local in locals_ if local is not None and local.is_floating_point())
    empty = [like.new_empty(0, dtype=op.dtype(like.dtype, options)) for _ in sharding.outputs]
    return empty[0] if sharding.more is None else tuple(empty)


def apply(op: Op, *tensors: Tensor | None, **options: Any) -> Tensor:
    """Run an op with a single output. The output is a DTensor if any operand is, otherwise a plain tensor.

    A plain tensor next to a DTensor counts as replicated. options: hashable values, except those in `Op.varying`.
    Raises LayoutError for layouts the op's rule cannot take; RuntimeError under torch.jit.trace.
    """
    refuse_jit_trace(op.name)
    if not torch.is_grad_enabled() and _are_plain(tensors):
        output: Tensor = op.infer(*tensors, **options)
        return output
    found: Tensor = _run(op, tensors, options)[0]
    return found


def apply_many(op: Op, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """`apply`, for an op of several outputs."""
    refuse_jit_trace(op.name)
    if not torch.is_grad_enabled() and _are_plain(tensors):
        outputs: tuple[Tensor, ...] = op.infer(*tensors, **options)
        return outputs
    found: tuple[Tensor, ...] = _run(op, tensors, options)[:-1]
    return found


def _are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no operand is a DTensor.

    Without gradients, an op on plain tensors is `Op.infer` alone: an autograd function would cost the host more than
    many an op.
    """
    for tensor in tensors:  # noqa: SIM110  a generator costs the host more
        if isinstance(tensor, DTensor):
            return False
    return True


def _run(op: Op, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """Return the op's outputs, then the `anchor` or None."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            if is_compiling():
                return *_in_graph(op.name, tuple(options.items()), *tensors), None
            return _on_mesh(op, tensor.device_mesh, tensors, options)
    if op.backward is None:
        output = op.forward(*tensors, **options)
        return (*output, None) if isinstance(output, tuple) else (output, None)
    return recorded(Plain, op, options, *tensors)


def _on_mesh(op: Op, mesh: DeviceMesh, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """`_run`, on DTensors."""
    call = Call.of(op, tensors, mesh, options)
    if not torch.is_grad_enabled():
        return *computed(call, options, tensors, recorded=False)[0], None
    if op.backward is not None or call.options is None:
        return recorded(Sharded, call, options, *tensors)
    flows: list[Flow] = []
    parts = ToLocal.apply(call, flows, *tensors)  # type: ignore[no-untyped-call]
    output = op.forward(*parts, **options, **call.options)
    outputs = (output,) if call.sharding.more is None else output
    return *FromLocal.apply(call, flows, *outputs), None  # type: ignore[no-untyped-call]


def recorded(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function. Raises RuntimeError under a transform of torch.func: ops support none."""
    if is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    try:
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise RuntimeError(
            "the ops of weft.kernels take no transform of torch.func (vmap, grad, jvp); differentiate them "
            "with torch.autograd.grad"
        ) from None


@in_graph
def _in_graph(name: str, options: tuple[tuple[str, Any], ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of an op on DTensors, while Dynamo traces."""
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return tuple(_on_mesh(OPS[name], mesh, tensors, dict(options))[:-1])
