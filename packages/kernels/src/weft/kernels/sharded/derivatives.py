"""Backward passes that are not differentiated: who asks for a second derivative is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_dtype, autocast_off
from ..op import Tensors


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
        arrived, first = grads[:-1], None
        for grad in arrived:  # a generator costs the host more
            if grad is not None:
                first = grad
                break
        if first is None:  # they are zeros, and so is what is asked for
            return (None,) * len(ctx.needs_input_grad)
        if autocast_dtype(first) is not None and not torch.compiler.is_compiling():  # backward is called in its region
            with autocast_off(first):
                return once(ctx, *grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *arrived)
        with torch.no_grad():
            found = backward(ctx, *arrived)
        return found if torch.compiler.is_compiling() else refusing(found, ctx.saved_tensors[-1], *arrived)

    return once


def refusing(found: Sequence[Tensor | None], *sources: Tensor | None) -> Tensors:
    """The gradients that a backward found, which lead to `sources`, and raise where they are differentiated."""
    return tuple(_Last.apply(each, *sources) if isinstance(each, Tensor) else each for each in found)  # type: ignore[no-untyped-call]


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        raise RuntimeError("the ops of weft.kernels have no second derivative; use torch's own where you need one")
