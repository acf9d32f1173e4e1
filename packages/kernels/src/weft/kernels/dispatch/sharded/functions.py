"""`apply` and `apply_many` run an `Op` on plain tensors and on DTensors, by the autograd functions in this file.

`PlainOp`: an op on plain tensors. `ShardedOp`: an op on DTensors. `ToLocal` and `FromLocal`: before and after the
forward of an op which torch differentiates, on DTensors.

Ops have no second derivatives: see `second_derivatives.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import LayoutError
from weft.reshard.extension import in_graph

from ..backend import is_compiling, refuse_jit_trace
from ..delayed_weight_gradients import compute_gradients
from ..op import OPS, Op, Tensors
from ..recomputed_activations import mark_recomputable, replace_recomputable, restore
from .call_plan import CallPlan, GradientLayouts, slice_gradient
from .folded import Saved
from .rules import Sharding
from .second_derivatives import first_order, make_node_link, refuse_second_derivative


class PlainOp(torch.autograd.Function):
    """Runs an op on plain tensors. Applied by `_run` with grad mode on, for an op with `Op.backward`.

    Returns the outputs, and last the link of `make_node_link`: a saved tensor by which a second derivative raises
    RuntimeError. None in place of the link where `first_order` needs none, and under torch.compile.
    """

    @staticmethod
    def forward(ctx: Any, op: Op, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        output, saved = op.forward(*tensors, **options)
        if is_compiling():
            is_tuple = isinstance(output, tuple)
            output = tuple([_as_view(each, tensors) for each in output]) if is_tuple else _as_view(output, tensors)
        ctx.op, ctx.options, ctx.is_tuple = op, options, isinstance(output, tuple)
        ctx.set_materialize_grads(False)
        if op.weights:
            ctx.is_tensor = [tensor is not None for tensor in tensors]
        needs_link = not _saves_operands(saved, tensors, ctx.needs_input_grad[2:])
        link = _save(ctx, op, saved, options, output[-1] if ctx.is_tuple else output, needs_link)
        if options.get("inplace") and output is tensors[0]:  # see `Op`
            ctx.mark_dirty(output)
        if not ctx.is_tuple:
            return output, link
        ctx.mark_non_differentiable(*output[len(output) - op.num_constants(options) :])
        return *output, link

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        grad = grads if ctx.is_tuple else grads[0]
        op, options, saved, needed = ctx.op, ctx.options, _restore_saved(ctx), ctx.needs_input_grad[2:]
        if op.epilogue_backward is not None:
            grad = op.epilogue_backward(saved, grad, needed, **options)
        if not op.weights:  # the op has no weights to delay
            return None, None, *op.backward(saved, grad, needed, **options)

        def compute(needed: Sequence[bool]) -> Tensors:
            gradients: Tensors = op.backward(saved, grad, needed, **options)
            return gradients

        return None, None, *compute_gradients(ctx, op.weights, needed, compute)


class ShardedOp(torch.autograd.Function):
    """Runs an op on DTensors: unwraps, computes locally, wraps. Applied by `_run_on_mesh` with grad mode on.

    Returns the outputs, and last the link of `make_node_link` or None, as `PlainOp`.
    Ranks outside the mesh use this function also for ops which torch differentiates: the op's forward does not run on
    these ranks, so torch would have no graph to differentiate.
    """

    @staticmethod
    def forward(ctx: Any, plan: CallPlan, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.overwritten = plan, tensors[0] if plan.overwrites else None
        if plan.op.weights:
            ctx.is_tensor = [tensor is not None for tensor in tensors]
        outputs, saved, ctx.options = _compute_on_mesh(plan, options, tensors)
        # The saved tensors are local: they do not lead to the DTensor operands.
        if plan.folded is None:
            link = _save(ctx, plan.op, saved, ctx.options, outputs[-1].to_local(), needs_link=True)
        else:
            link, ctx.recipes = make_node_link(), None
            ctx.save_for_backward(*saved, link)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[len(outputs) - plan.num_constants :])
        return *outputs, link

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: DTensor | None) -> Tensors:
        plan: CallPlan = ctx.plan
        needed = ctx.needs_input_grad[2:]
        layouts = plan.gradient_layouts(grads)
        local_grads = tuple(
            None if grad is None else slice_gradient(grad, layout).to_local()
            for grad, layout in zip(grads, layouts.slices, strict=True)
        )
        if plan.is_in_mesh:
            assert plan.op.backward is not None, "ops without a backward go through ToLocal and FromLocal"
            grad = local_grads if plan.sharding.is_tuple else local_grads[0]
            backward, saved, options = plan.op.backward, _restore_saved(ctx), ctx.options
            folded = plan.folded
            if folded is None and plan.op.epilogue_backward is not None:
                grad = plan.op.epilogue_backward(saved, grad, needed, **options)

            def compute(needed: Sequence[bool]) -> list[Tensor | None]:
                if folded is None:
                    return plan.wrap_gradients(backward(saved, grad, needed, **options), layouts)
                gradients = folded.backward(saved, options, local_grads, layouts.rule, needed)
                return plan.wrap_gradients(gradients, layouts)

            gradients = compute_gradients(ctx, plan.op.weights, needed, compute)
            if ctx.overwritten is not None:
                # autograd looks at the DTensor's version, not at the local tensor's
                torch.autograd.graph.increment_version(ctx.overwritten)
        else:  # the gradients are empty
            like = next(grad for grad in local_grads if grad is not None)
            dtypes = zip(plan.dtypes, needed, strict=True)
            empty = tuple(like.new_empty(0, dtype=dtype) if need else None for dtype, need in dtypes)
            gradients = plan.wrap_gradients(empty, layouts)
        return None, None, *gradients


class ToLocal(torch.autograd.Function):
    """Unwraps the operands of an op differentiated by torch. The dual is `FromLocal`."""

    @staticmethod
    def forward(
        ctx: Any, plan: CallPlan, mailbox: list[GradientLayouts], *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Returns the local tensors of the operands.

        mailbox: an empty list, the same as for `FromLocal`. The backward of `FromLocal` appends the layouts of the
        operands' gradients; the backward of `ToLocal` runs later and reads these.
        """
        ctx.plan, ctx.mailbox = plan, mailbox
        ctx.set_materialize_grads(False)
        undetached = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        locals_ = tuple(None if local is None else local.detach() for local in undetached)
        needed = zip(locals_, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*[local for local, need in needed if local is not None and not need])
        return locals_

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        with torch.no_grad():
            gradients = ctx.plan.wrap_gradients(grads, ctx.mailbox[-1])
        return None, None, *(refuse_second_derivative(gradients, *grads) if torch.is_grad_enabled() else gradients)


class FromLocal(torch.autograd.Function):
    """Wraps the outputs of an op differentiated by torch. The dual is `ToLocal`."""

    @staticmethod
    def forward(ctx: Any, plan: CallPlan, mailbox: list[GradientLayouts], *outputs: Tensor) -> tuple[DTensor, ...]:
        """Returns the outputs as DTensors. mailbox: see `ToLocal.forward`."""
        ctx.plan, ctx.mailbox = plan, mailbox
        ctx.set_materialize_grads(False)
        wrapped = [plan.wrap_output(i, output.detach()) for i, output in enumerate(outputs)]
        ctx.mark_non_differentiable(*(each for each in wrapped if not (each.is_floating_point() or each.is_complex())))
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Tensors:
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(grads))
        with torch.no_grad():
            layouts = ctx.plan.gradient_layouts(grads)
            ctx.mailbox.append(layouts)
            locals_ = tuple(
                None if grad is None else slice_gradient(grad, layout).to_local()
                for grad, layout in zip(grads, layouts.slices, strict=True)
            )
        return None, None, *(refuse_second_derivative(locals_, *grads) if torch.is_grad_enabled() else locals_)


def _compute_on_mesh(
    plan: CallPlan, options: dict[str, Any], tensors: tuple[Tensor | None, ...], *, saves: bool = True
) -> tuple[list[DTensor], Tensors, dict[str, Any] | Saved]:
    """Compute an op on DTensors. Returns the outputs, the tensors saved for backward, and the options for backward.

    options: as given by the caller. The returned options include this rank's `CallPlan.local_options`; inside
        `exact_sums` they are `folded.Saved`, with the options of each coordinate.
    saves: whether a backward may follow. If not, no tensors are saved.
    """
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    op, sharding = plan.op, plan.sharding
    saved: Tensors = ()
    used: dict[str, Any] | Saved = options
    saves = saves and op.backward is not None
    if not plan.is_in_mesh:
        output = _empty_outputs(op, locals_, sharding, options)
        outputs = output if sharding.is_tuple else (output,)
    elif plan.folded is not None:
        outputs, saved, used = plan.folded.forward(locals_, options, saves=saves)
    else:
        used = options = {**options, **plan.local_options} if plan.local_options else options
        if saves:
            output, saved = op.forward(*locals_, **options)
        else:
            output = op.compute_outputs(*locals_, **options)
        outputs = output if sharding.is_tuple else (output,)
    return [plan.wrap_output(i, local) for i, local in enumerate(outputs)], saved, used


def _as_view(output: Tensor, operands: tuple[Tensor | None, ...]) -> Tensor:
    """A view of the output; the output itself if an operand is the output.

    Used under torch.compile. A kernel writes into the output in place. If an autograd function returns this tensor
    itself, Dynamo of torch 2.11 gives the operands zero gradients; with a view, the gradients are right.
    """
    for operand in operands:
        if operand is output:
            return output
    return output.view_as(output)


def _saves_operands(saved: Tensors, tensors: tuple[Tensor | None, ...], needed: Sequence[bool]) -> bool:
    """Whether each operand whose gradient is needed is among the saved tensors, as the same object."""
    for tensor, need in zip(tensors, needed, strict=True):
        if need:
            for each in saved:  # loops cost the host less than generators, and `in` would compare the tensors' values
                if each is tensor:
                    break
            else:
                return False
    return True


def _save(ctx: Any, op: Op, saved: Tensors, options: dict[str, Any], output: Tensor, needs_link: bool) -> Tensor | None:
    """Save `saved` for backward, with recomputable tensors replaced. Returns the link of `make_node_link`, or None.

    output: this rank's local tensor of the last output.
    needs_link: whether `saved` lacks an operand whose gradient is needed. The link is also made if a saved tensor is
        replaced. See `first_order`.
    """
    if not saved or is_compiling():
        ctx.recipes = None
        ctx.save_for_backward(*saved, None)
        return None
    if op.recompute is not None and True in ctx.needs_input_grad:
        mark_recomputable(output, op, saved, options)
    tensors, ctx.recipes = replace_recomputable(saved)
    link = make_node_link() if needs_link or ctx.recipes else None
    ctx.save_for_backward(*tensors, link)
    return link


def _restore_saved(ctx: Any) -> Tensors:
    """In backward: return the tensors that `_save` received."""
    tensors: Tensors = ctx.saved_tensors[:-1]
    return restore(tensors, ctx.recipes) if ctx.recipes else tensors


def _empty_outputs(op: Op, locals_: list[Tensor | None], sharding: Sharding, options: dict[str, Any]) -> Any:
    """The empty outputs of an op on a rank outside the mesh."""
    operands = [local for local in locals_ if local is not None]
    like = next((local for local in operands if local.is_floating_point()), operands[0])
    dtype = op.dtype(like.dtype, options)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * len(sharding.outputs)
    empty = [like.new_empty(0, dtype=each) for each in dtypes]
    return tuple(empty) if sharding.is_tuple else empty[0]


def apply(op: Op, *tensors: Tensor | None, **options: Any) -> Tensor:
    """Run an op with a single output. The output is a DTensor if any operand is, otherwise a plain tensor.

    Called by the public function of the op, in each call.
    A plain tensor next to a DTensor counts as replicated. options: hashable values, except those in `Op.varying`.
    Raises LayoutError for layouts the op's rule cannot take; RuntimeError under torch.jit.trace.
    """
    refuse_jit_trace(op.name)
    if not torch.is_grad_enabled() and _are_plain(tensors):
        output: Tensor = op.compute_outputs(*tensors, **options)
        return output
    differentiable: Tensor = _run(op, tensors, options)[0]
    return differentiable


def apply_many(op: Op, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """`apply`, for an op which may have several outputs. Returns a tuple, also for a single output."""
    refuse_jit_trace(op.name)
    if not torch.is_grad_enabled() and _are_plain(tensors):
        outputs: tuple[Tensor, ...] = op.compute_outputs(*tensors, **options)
        return outputs
    differentiable: tuple[Tensor, ...] = _run(op, tensors, options)[:-1]
    return differentiable


def _are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no operand is a DTensor.

    With grad mode off, an op on plain tensors is `Op.compute_outputs` alone: an autograd function would cost the host
    more time than many an op takes.
    """
    for tensor in tensors:  # noqa: SIM110  a generator costs the host more
        if isinstance(tensor, DTensor):
            return False
    return True


def _needs_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _run(op: Op, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """Return the op's outputs, then the link of `make_node_link` or None."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            if is_compiling():
                return *_run_in_graph(op.name, tuple(options.items()), *tensors), None
            return _run_on_mesh(op, tensor.device_mesh, tensors, options)
    if op.backward is None or (is_compiling() and not _needs_gradient(tensors)):
        output = op.compute_outputs(*tensors, **options)  # Dynamo cannot trace PlainOp where nothing needs a gradient
        return (*output, None) if isinstance(output, tuple) else (output, None)
    return apply_function(PlainOp, op, options, *tensors)


def _run_on_mesh(op: Op, mesh: DeviceMesh, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """`_run` for operands with a DTensor among them. mesh: of any of the DTensors."""
    plan = CallPlan.find(op, tensors, mesh, options)
    if not torch.is_grad_enabled():
        return *_compute_on_mesh(plan, options, tensors, saves=False)[0], None
    if op.backward is not None or not plan.is_in_mesh:
        return apply_function(ShardedOp, plan, options, *tensors)
    if plan.folded is not None:
        if not _needs_gradient(tensors):
            return *_compute_on_mesh(plan, options, tensors, saves=False)[0], None
        raise LayoutError(
            f"{op.name} is differentiated by torch, which cannot run backward for each coordinate of the mesh named in "
            f"exact; leave out exact"
        )
    mailbox: list[GradientLayouts] = []
    locals_ = ToLocal.apply(plan, mailbox, *tensors)  # type: ignore[no-untyped-call]
    output = op.forward(*locals_, **options, **plan.local_options)
    outputs = output if plan.sharding.is_tuple else (output,)
    return *FromLocal.apply(plan, mailbox, *outputs), None  # type: ignore[no-untyped-call]


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function. Raises RuntimeError under a transform of torch.func: ops support none.

    Called by `_run` and `_run_on_mesh`, and by `weft.models.parallel` for autograd functions on DTensors.
    """
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


@in_graph  # while Dynamo traces, a call is a single node of the graph
def _run_in_graph(name: str, options: tuple[tuple[str, Any], ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of an op on DTensors. The op is found by its name, because a node takes no other objects."""
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return tuple(_run_on_mesh(OPS[name], mesh, tensors, dict(options))[:-1])
