"""Delayed weight gradients, for pipeline schedules that split backward into input (I) and weight (W) passes.

Inside `waiting_weights`, backward computes all gradients except delayed weight gradients, and collects one function
per op to compute those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Later = list[Callable[[], None]]

_may_wait = False
_later: Later | None = None  # per process, not per thread: autograd runs backward in threads of its own


@contextmanager
def waiting_weights() -> Iterator[Later]:
    """Context for a backward pass that delays weight gradients. Yields a list of functions to call later.

    Each function computes the delayed gradients of one op and adds them to `.grad`. Delayed are the operands at the
    positions `Op.weights`, if they are parameters (not computed tensors). `linear` delays only if recorded inside
    `weights_may_wait`: outside, it may use torch's own function.
    A delayed parameter's hooks run twice: in backward with the gradient None (a post-accumulate hook then sees the old
    `.grad`), and when the delayed function runs.
    """
    global _later
    before, _later = _later, []
    try:
        yield _later
    finally:
        _later = before


@contextmanager
def weights_may_wait() -> Iterator[None]:
    """Context for a forward pass whose weight gradients `waiting_weights` may delay.

    Inside, `linear` never uses torch's own autograd function, which cannot delay.
    """
    global _may_wait
    before, _may_wait = _may_wait, True
    try:
        yield
    finally:
        _may_wait = before


def may_wait() -> bool:
    """Whether an op recorded now may have to delay weight gradients.

    True inside `weights_may_wait`, and inside `waiting_weights`, where activation checkpointing runs a forward again.
    """
    return _may_wait or _later is not None


class _Deferred(torch.autograd.Function):
    """Returns a scalar. Its backward calls `compute` and returns the results as the parameters' gradients.

    Autograd can store such a gradient as `.grad` without a copy. It copies gradients passed to
    `torch.autograd.backward`, because the caller still refers to them.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Sequence[Tensor | None]], *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return torch.empty((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compute()


def compute_or_wait(
    ctx: Any,
    weights: Sequence[int],
    needed: Sequence[bool],
    compute: Callable[[Sequence[bool]], Sequence[Tensor | None]],
) -> Sequence[Tensor | None]:
    """Return the gradients of an op's operands, by position.

    Inside `waiting_weights`, return None for delayed weights, and append a function that computes their gradients to
    the list of `waiting_weights`.

    ctx: of the op's autograd function; `ctx.given` tells for each operand whether it is a tensor or None.
    weights: the positions of weights to delay, `Op.weights`.
    compute: takes a flag for each operand, whether its gradient is needed, and returns the gradients.
    """
    if _later is None or not weights:
        return compute(needed)
    parameters: dict[int, Tensor] = {}
    for i in weights:
        if i < len(needed) and needed[i]:
            node = ctx.next_functions[sum(ctx.given[:i])][0]
            if hasattr(node, "variable"):  # the operand is a parameter: its node accumulates into `.grad`
                parameters[i] = node.variable
    if not parameters:
        return compute(needed)

    def gradients() -> list[Tensor | None]:
        found = compute([i in parameters for i in range(len(needed))])
        return [found[i] for i in parameters]

    def add() -> None:
        with torch.enable_grad():
            _Deferred.apply(gradients, *parameters.values()).backward()  # type: ignore[no-untyped-call]

    _later.append(add)
    return compute([need and i not in parameters for i, need in enumerate(needed)])
