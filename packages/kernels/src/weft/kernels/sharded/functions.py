"""The autograd functions of ops: on plain tensors, on DTensors, and on DTensors for ops differentiated by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..again import mark_recomputable, replace_recomputable, restore
from ..backend import is_compiling
from ..op import Op, Tensors
from ..weights import compute_or_wait
from .calls import Call, Flow, sliced
from .derivatives import anchor, first_order, refusing
from .rules import Sharding


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
        ctx.mark_non_differentiable(*_constants(op, output, options))
        return *output, anchor_

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        grad = grads if ctx.many else grads[0]
        op, options, saved, needed = ctx.op, ctx.options, _restored(ctx), ctx.needs_input_grad[2:]
        if op.of_products is not None:
            grad = op.of_products(saved, grad, needed, **options)
        if not op.weights:  # the op has no weights to delay
            return None, None, *op.backward(saved, grad, needed, **options)

        def compute(needed: Sequence[bool]) -> Tensors:
            gradients: Tensors = op.backward(saved, grad, needed, **options)
            return gradients

        return None, None, *compute_or_wait(ctx, op.weights, needed, compute)


class Sharded(torch.autograd.Function):
    """Runs an op on DTensors: unwraps, computes locally, wraps. Returns the outputs and their `anchor`."""

    @staticmethod
    def forward(ctx: Any, call: Call, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        ctx.call, ctx.overwritten = call, tensors[0] if call.op.overwrites(options) else None
        ctx.given = [tensor is not None for tensor in tensors]
        outputs, saved, ctx.options = computed(call, options, tensors)
        anchor_ = _save(ctx, call.op, saved, ctx.options, outputs[-1].to_local(), False)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*_constants(call.op, outputs, options))
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
            if call.op.of_products is not None:
                local = call.op.of_products(saved, local, needed, **options)

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
        """flows: a list. `FromLocal.backward` appends the gradients' flow before `ToLocal.backward` reads it."""
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
    """Whether every operand with a gradient is itself among the saved tensors, not a copy or a precomputed gradient."""
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

    output: this rank's part of the last output. leads: from `_leads`; then the saved tensors link to the operands, as
        an anchor would.
    """
    if not saved or is_compiling():
        ctx.recipes = None
        ctx.save_for_backward(*saved, None)
        return None
    if op.again is not None and True in ctx.needs_input_grad:
        mark_recomputable(output, op, saved, options)
    tensors, ctx.recipes = replace_recomputable(saved)
    anchor_ = None if leads and not ctx.recipes else anchor()
    ctx.save_for_backward(*tensors, anchor_)
    return anchor_


def _restored(ctx: Any) -> Tensors:
    """The tensors given to `_save`, in backward."""
    tensors: Tensors = ctx.saved_tensors[:-1]
    return restore(tensors, ctx.recipes) if ctx.recipes else tensors


def _constants(op: Op, outputs: Sequence[Any], options: dict[str, Any]) -> Sequence[Any]:
    """The outputs without a gradient, which are the last ones."""
    return outputs[len(outputs) - op.constants(options) :]


def _nothing(op: Op, locals_: list[Tensor | None], sharding: Sharding, options: dict[str, Any]) -> Any:
    """The empty outputs of an op on a rank outside the mesh."""
    like = next(local for local in locals_ if local is not None and local.is_floating_point())
    empty = [like.new_empty(0, dtype=op.dtype(like.dtype, options)) for _ in sharding.outputs]
    return empty[0] if sharding.more is None else tuple(empty)
