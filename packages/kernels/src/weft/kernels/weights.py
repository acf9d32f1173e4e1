"""Gradients of weights that wait: a backward pass gives those of its inputs alone, and what it leaves is computed later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Later = list[Callable[[], None]]

_may_wait = False
_later: Later | None = None  # of the process: autograd runs backward in threads of its own


@contextmanager
def waiting_weights() -> Iterator[Later]:
    """Inside, ops leave the gradients of weights in the list that is given, to be computed and added up by calling what is in it.

    Ops of which those are products of their own do so (`Op.weights`), for weights that are parameters themselves, if they were
    recorded where `weights_may_wait`. torch calls a parameter's hooks both times, first without its gradient.
    """
    global _later
    before, _later = _later, []
    try:
        yield _later
    finally:
        _later = before


@contextmanager
def weights_may_wait() -> Iterator[None]:
    """Inside, ops are recorded so that the gradients of their weights may wait in backward: none by torch's own functions."""
    global _may_wait
    before, _may_wait = _may_wait, True
    try:
        yield
    finally:
        _may_wait = before


def may_wait() -> bool:
    """Whether gradients of weights may wait in the backward of what is recorded now; also of what a backward computes again."""
    return _may_wait or _later is not None


class _Deferred(torch.autograd.Function):
    """A scalar whose backward gives parameters what `compute` returns, as a function's that torch may keep without a copy.

    Given to `torch.autograd.backward`, they would be copied: its caller refers to them, too.
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
    """The gradients of an op's operands; where weights wait, without theirs.

    ctx: of the op's autograd function; `ctx.given` says which operands there are. weights: the positions of those that may wait.
    compute: the gradients that are needed, by position.
    """
    if _later is None or not weights:
        return compute(needed)
    parameters: dict[int, Tensor] = {}
    for i in weights:
        if i < len(needed) and needed[i]:
            node = ctx.next_functions[sum(ctx.given[:i])][0]
            if hasattr(node, "variable"):  # it adds up in a parameter
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
