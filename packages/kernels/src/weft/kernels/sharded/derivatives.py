"""Ops have no second derivatives: asking for a second derivative raises an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_dtype, autocast_off, is_autocasting
from ..backend import is_compiling
from ..op import Tensors


def anchor() -> Tensor:
    """An extra, empty output of an autograd function, saved last. See `first_order` for its use."""
    return torch.empty(0)


def first_order(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Decorator for the backward of an autograd function. Differentiating the returned gradients raises RuntimeError.

    Autograd runs only nodes on a path to the requested tensors. For that path the returned gradients are linked to
    the upstream gradients, and through the saved tensors to the operands. A function without every operand among its
    saved tensors saves an `anchor`, its last output. If a function saves nothing, its gradients do not depend on its
    operands.

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
