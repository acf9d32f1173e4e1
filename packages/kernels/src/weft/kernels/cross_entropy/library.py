"""cross_entropy as custom ops of torch, with shapes for what is traced: what torch.compile puts in its graph, whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import function
from .options import Options

Made = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # loss, lse, denominator and statistics; the third empty unless counted here


def compiled(
    logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *, options: Options
) -> tuple[Tensor, ...]:
    """Loss and lse. The gradient is out of place whatever was asked: the compiler decides on memory."""
    loss, lse, _, _ = _forward(
        logits, target, weight, denominator, options.ignore_index, options.reduction, float(options.label_smoothing),
        float(options.z_loss), options.softcap, float(options.logit_scale),
    )  # fmt: skip
    return loss, lse


@torch.library.custom_op("weft::cross_entropy", mutates_args=())
def _forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
) -> Made:
    options = _options(ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale)
    (loss, lse), saved = function.forward(logits, target, weight, denominator, options=options)
    counted, statistics = saved[3:]
    assert statistics is not None, "forward saves them"
    if counted is None or denominator is not None:
        counted = statistics.new_empty(0)  # an output may be no input
    return loss, lse, counted, statistics


@_forward.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    *bend: Any,
) -> Made:
    wide = torch.promote_types(logits.dtype, torch.float32)
    lse = torch.empty(target.shape, dtype=wide, device=logits.device)
    counts = reduction == "mean" and denominator is None
    return (
        torch.empty_like(lse) if reduction == "none" else lse.new_empty(()),
        lse,
        lse.new_empty(() if counts else 0),
        lse.new_empty(1, target.numel(), 4 if label_smoothing else 3),
    )


@torch.library.custom_op("weft::cross_entropy_backward", mutates_args=())
def _backward(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    statistics: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
) -> Tensor:
    options = _options(ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale)
    saved = (logits, target, weight, denominator, statistics)
    dlogits, *_ = function.backward(saved, (grad, grad_lse), (True, False, False, False), options=options)
    assert dlogits is not None, "it was asked for"
    return dlogits


@_backward.register_fake
def _(grad: Tensor | None, grad_lse: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    logits, target, weight, denominator, *ctx.asked = inputs
    _, _, counted, statistics = output
    ctx.counts = counted.ndim == 0
    ctx.save_for_backward(logits, target, weight, counted if ctx.counts else denominator, statistics)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    return _backward(grad, grad_lse, *ctx.saved_tensors, *ctx.asked), *(None,) * 9


_forward.register_autograd(_gradients, setup_context=_keep)


def _options(
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float
) -> Options:
    return Options(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
        logit_scale=logit_scale, return_lse=True,
    )  # fmt: skip
