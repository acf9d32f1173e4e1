"""The loss alone, without options, of a few rows that have all classes, on a CPU: by the odds against each row's target.

What the host asks for is most of what such a loss takes: here, forward and backward, it is two thirds of the ops of `reference`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..backend import on_cpu, use_triton
from .merged import Shard
from .options import Options
from .reference import CHUNK

PLAIN = {reduction: Options(reduction=reduction) for reduction in ("mean", "sum", "none")}


def takes(logits: Tensor, weight: Tensor | None, shard: Shard) -> bool:
    """Whether `loss_and_gradient` computes this loss. Then no target is to be ignored, and forward may compute the gradient."""
    options = shard.options
    return (
        shard.all_count
        and weight is None
        and options == PLAIN[options.reduction]
        and shard.size == logits.shape[-1]
        and logits.dtype in (torch.float32, torch.float64)
        and logits.numel() <= CHUNK
        and on_cpu(logits)
        and not use_triton(logits)
    )


def loss_and_gradient(logits: Tensor, target: Tensor, upstream: Tensor | None, out: Tensor | None) -> Tensor | None:
    """Each row's loss [N] in float64, and in `out`, of the logits' shape, their gradient. None where a logit is not finite, or so far
    above its target's that its exponential is not.

    upstream: the gradient of the losses, a scalar or [N]. Where it or `out` is None, no gradient is computed.
    With the target's probability p the odds against it are (1 - p) / p, the sum of exp(logit - target's logit) over the other
    classes: the loss is log1p(odds), its gradient exp(logit - target's logit) / (1 + odds), and -odds / (1 + odds) at the target.
    All are accurate for p near 1.
    """
    index = target.reshape(-1, 1).long()
    z = logits.reshape(-1, logits.shape[-1]).to(torch.float64, copy=True)
    z.sub_(z.gather(1, index)).scatter_(1, index, -torch.inf)
    odds = z.exp_().sum(-1, keepdim=True)
    if not math.isfinite(odds.sum().item()):
        return None
    if upstream is not None and out is not None:
        share = upstream.reshape(-1, 1) / (1 + odds)
        z.mul_(share).scatter_(1, index, share.mul_(odds).neg_())
        out.copy_(z.view(out.shape))
    return odds.log1p_().squeeze_(1)
