"""Ops have no second derivatives: asking for one raises an error, instead of giving a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_dtype, autocast_off, is_autocasting
from ..backend import is_compiling
from ..op import Tensors


def make_node_link() -> Tensor:
    """Make an empty tensor for an autograd function to return as the last output, and to save.

    In backward, this saved tensor's `grad_fn` is the node of the function itself, from which autograd reaches all
    operands. `first_order` needs the link where an operand is not saved.
    """
    return torch.empty(0)


def first_order(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Decorator for the backward of an autograd function whose last output is the link of `make_node_link`, or None.

    Differentiating the gradients by any tensor t then raises RuntimeError. Autograd runs only the nodes between the
    gradients and t, and one of these nodes must raise. Therefore `refuse_second_derivative` puts a raising
    node between the gradients and all tensors from which they were computed: the upstream gradients and the operands.
    An operand is reached through the saved tensors: either the operand is saved, or the link leads to the function's
    node and on to the operand. The gradients of a function that saves nothing do not depend on the operands.

    torch's `once_differentiable` may treat the gradients as constants instead of raising.
    """

    def run_backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        output_grads, first = grads[:-1], None  # without the link's
        for grad in output_grads:  # any() with a generator would cost the host more
            if grad is not None:
                first = grad
                break
        if first is None:  # all upstream gradients are zero; the results are zero too
            return (None,) * len(ctx.needs_input_grad)
        # Backward may be called inside an autocast region.
        if is_autocasting() and autocast_dtype(first) is not None and not is_compiling():
            with autocast_off(first):
                return run_backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *output_grads)
        with torch.no_grad():
            gradients = backward(ctx, *output_grads)
        return gradients if is_compiling() else refuse_second_derivative(gradients, *ctx.saved_tensors, *output_grads)

    return run_backward


def refuse_second_derivative(gradients: Sequence[Tensor | None], *sources: Tensor | None) -> Tensors:
    """Return the gradients, linked to `sources`: differentiating a gradient by a source raises RuntimeError.

    For a backward run with grad mode on (`create_graph=True`), which has computed the gradients without a graph.
    """
    return tuple(
        _NoSecondDerivative.apply(each, *sources) if isinstance(each, Tensor) else each  # type: ignore[no-untyped-call]
        for each in gradients
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
