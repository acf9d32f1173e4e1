"""Ops have no second derivatives: asking for one raises an error, instead of giving a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import autocast_dtype, autocast_off, is_autocasting, is_compiling
from ..op import Tensors


def make_node_link() -> Tensor:
    """Make the link: an empty tensor which an autograd function returns as the last output, and saves for backward.

    In backward, the `grad_fn` of the saved link is the node of the function itself, from which autograd reaches all
    operands. `first_order` needs the link if an operand is not saved.
    """
    return torch.empty(0)


def first_order(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Decorator for the backward of an autograd function whose last output is the link of `make_node_link`, or None.

    Differentiating the gradients by any tensor t then raises RuntimeError. Autograd runs only the nodes between the
    gradients and t, so a node on each path must raise. `refuse_second_derivative` puts this node between the gradients
    and all tensors from which the gradients were computed: the upstream gradients and the operands. The path to an
    operand leads through a saved tensor, either the operand itself or the link. A function which saves nothing has
    gradients which do not depend on operands.

    torch's `once_differentiable` does not serve: a gradient may then count as a constant, without an error.
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

    For a backward which is run with grad mode on (`create_graph=True`), and computed the gradients with grad mode off.
    """
    return tuple(
        _NoSecondDerivative.apply(each, *sources) if isinstance(each, Tensor) else each  # type: ignore[no-untyped-call]
        for each in gradients
    )


class _NoSecondDerivative(torch.autograd.Function):
    """Returns a view of the gradient. Backward raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        raise RuntimeError(
            "the ops of weft.kernels have no second derivative; use torch's own ops to differentiate twice"
        )
