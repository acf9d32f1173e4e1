"""Delayed weight gradients, for pipeline schedules that split backward into input (I) and weight (W) passes.

A pipeline runner (`weft.models.parallel`) runs the forward pass inside `allow_delayed_weight_gradients`, and the I pass
inside `delay_weight_gradients`. In the I pass each op computes only the input's gradient, and appends a function that
computes the weights' gradients to a list. The W pass calls the functions in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Functions without arguments, one for each op: compute the op's weight gradients and add them to `.grad`.
DelayedGradients = list[Callable[[], None]]

_is_delay_allowed = False
# The list of the current `delay_weight_gradients`. Per process, not per thread: autograd runs backward in threads of
# its own.
_delayed: DelayedGradients | None = None


@contextmanager
def delay_weight_gradients() -> Iterator[DelayedGradients]:
    """Context for a backward pass (I) that delays weight gradients. Yields a list of functions, filled by backward.

    Call every function later (W): a function computes the weight gradients of an op and adds the gradients to `.grad`.
    The gradients of the operands at `Op.weights` are delayed, if the operands are parameters (not computed tensors).
    `linear` delays only if the forward ran inside `allow_delayed_weight_gradients`; outside, `linear` may have used
    torch's own function.
    A delayed parameter's hooks run twice: in backward with None for the gradient (a post-accumulate hook then sees the
    old `.grad`), and again when the delayed function runs. So a parameter is delayed only if every hook is marked with
    a true attribute `takes_none`, as GradientSync's are; a program's own hooks would see None, or run once too often.
    """
    global _delayed
    previous, _delayed = _delayed, []
    try:
        yield _delayed
    finally:
        _delayed = previous


@contextmanager
def allow_delayed_weight_gradients() -> Iterator[None]:
    """Context for a forward pass whose backward will run inside `delay_weight_gradients`.

    Inside, `linear` never uses torch's own autograd function, which cannot delay.
    """
    global _is_delay_allowed
    previous, _is_delay_allowed = _is_delay_allowed, True
    try:
        yield
    finally:
        _is_delay_allowed = previous


def is_delay_allowed() -> bool:
    """Whether to compute a forward pass by ops that can delay weight gradients. `native_linear` asks in each call.

    True inside `allow_delayed_weight_gradients`. Also true inside `delay_weight_gradients`, because activation
    checkpointing runs forward passes again during backward.
    """
    return _is_delay_allowed or _delayed is not None


class _DelayedBackward(torch.autograd.Function):
    """Returns a scalar whose backward calls `compute` and returns the results as the parameters' gradients.

    A gradient returned by an autograd function can become `.grad` without a copy. A gradient passed to
    `torch.autograd.backward` is copied, because the caller still refers to the gradient.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Sequence[Tensor | None]], *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.empty((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compute()


def _takes_none(parameter: Tensor) -> bool:
    """Whether every gradient hook of the parameter may be called without a gradient."""
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return all(getattr(hook, "takes_none", False) for each in hooks if each for hook in each.values())


def compute_gradients(
    ctx: Any,
    weights: Sequence[int],
    needed: Sequence[bool],
    compute: Callable[[Sequence[bool]], Sequence[Tensor | None]],
) -> Sequence[Tensor | None]:
    """Return the gradients of an op's operands, by position. Called in the backward of an op's autograd function.

    Inside `delay_weight_gradients` the weights' gradients are delayed: the result has None for the weights, and a
    function that computes the weights' gradients is appended to the context's list.

    ctx: the autograd function's context; `ctx.is_tensor` has a flag for each operand: True for a tensor, False for
        None.
    weights: the positions of weights to delay, `Op.weights`.
    needed: a flag for each operand, whether autograd needs the operand's gradient.
    compute: the op's backward. Takes flags like `needed`, and returns the gradients.
    """
    if _delayed is None or not weights:
        return compute(needed)
    parameters: dict[int, Tensor] = {}  # the weights to delay, by position
    for i in weights:
        if i < len(needed) and needed[i]:  # a call may leave out the last operands, for example biases
            node = ctx.next_functions[sum(ctx.is_tensor[:i])][0]  # next_functions has an entry for each tensor
            # The operand is a parameter if its node accumulates into `.grad`.
            if hasattr(node, "variable") and _takes_none(node.variable):
                parameters[i] = node.variable
    if not parameters:
        return compute(needed)

    def compute_delayed() -> list[Tensor | None]:
        gradients = compute([i in parameters for i in range(len(needed))])
        return [gradients[i] for i in parameters]

    def add_to_grad() -> None:
        with torch.enable_grad():
            _DelayedBackward.apply(compute_delayed, *parameters.values()).backward()  # type: ignore[no-untyped-call]

    _delayed.append(add_to_grad)
    return compute([need and i not in parameters for i, need in enumerate(needed)])
