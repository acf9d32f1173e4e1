"""Backward passes that are not differentiated: who asks for a second derivative is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_dtype, autocast_off, is_autocasting
from ..backend import is_compiling
from ..op import Tensors


def anchor() -> Tensor:
    """One more output of a function, empty, which it saves last: in backward it leads to the operands, see `first_order`."""
    return torch.empty(0)


def first_order(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """A backward that is not differentiated: what it returns raises where that is asked for, of any tensor.

    Autograd visits only what leads to the tensors that it is asked for, so the gradients that are returned lead to the operands, by
    what was saved, and to the gradients that arrived. Where a function has not saved all its operands, it saves an `anchor`, its last
    output; where it has saved nothing, its gradients are constants of its operands. torch's `once_differentiable` lets such a
    question pass, as if the gradients were constants.
    """

    def once(ctx: Any, *grads: Tensor | None) -> Tensors:
        arrived, first = grads[:-1], None
        for grad in arrived:  # a generator costs the host more
            if grad is not None:
                first = grad
                break
        if first is None:  # they are zeros, and so is what is asked for
            return (None,) * len(ctx.needs_input_grad)
        # Backward may be called in a region of autocast.
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
    """The gradients that a backward found, which lead to `sources`, and raise where they are differentiated."""
    return tuple(_Last.apply(each, *sources) if isinstance(each, Tensor) else each for each in found)  # type: ignore[no-untyped-call]


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        raise RuntimeError("the ops of weft.kernels have no second derivative; use torch's own where you need one")
