"""cross_entropy as custom ops of torch, with shapes for what is traced: what torch.compile puts in its graph, whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from . import function
from .options import SCHEMA, Options

Made = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # loss, lse, denominator and statistics; the third empty unless counted here
TENSORS = "Tensor logits, Tensor target, Tensor? weight, Tensor? denominator"


def compiled(
    logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *, options: Options
) -> tuple[Tensor, ...]:
    """Loss and lse. The gradient is out of place whatever was asked: the compiler decides on memory."""
    loss, lse, _, _ = forward(logits, target, weight, denominator, *options.flat())
    return loss, lse


@library.custom_op(
    "weft::cross_entropy", mutates_args=(), schema=f"({TENSORS}, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def forward(logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *asked: Any) -> Made:
    options = _with_lse(*asked)
    (loss, lse), saved = function.forward(logits, target, weight, denominator, options=options)
    counted, statistics = saved[3:5]
    assert statistics is not None, "forward saves them"
    if counted is None or denominator is not None:
        counted = statistics.new_empty(0)  # an output may be no input
    return loss, lse, counted, statistics


@forward.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *asked: Any) -> Made:
    options = _with_lse(*asked)
    lse = torch.empty(target.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    counts = options.reduction == "mean" and denominator is None
    return (
        torch.empty_like(lse) if options.reduction == "none" else lse.new_empty(()),
        lse,
        lse.new_empty(() if counts else 0),
        lse.new_empty(1, target.numel(), 4 if options.label_smoothing else 3),
    )


@library.custom_op(
    "weft::cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor? grad, Tensor? grad_lse, {TENSORS}, Tensor statistics, {SCHEMA}) -> Tensor",
)
def backward(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    statistics: Tensor,
    *asked: Any,
) -> Tensor:
    saved, needed = (logits, target, weight, denominator, statistics, None, None), (True, False, False, False)
    dlogits, *_ = function.backward(saved, (grad, grad_lse), needed, options=_with_lse(*asked))
    assert dlogits is not None, "it was asked for"
    return dlogits


@backward.register_fake
def _(grad: Tensor | None, grad_lse: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    logits, target, weight, denominator, *ctx.asked = inputs
    _, _, counted, statistics = output
    ctx.save_for_backward(logits, target, weight, counted if counted.ndim == 0 else denominator, statistics)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    return backward(grad, grad_lse, *ctx.saved_tensors, *ctx.asked), *(None,) * (3 + len(ctx.asked))


forward.register_autograd(_gradients, setup_context=_keep)


def _with_lse(*asked: Any) -> Options:
    """The ops always make it, so that they have one form."""
    return replace(Options.of_flat(*asked), return_lse=True)
