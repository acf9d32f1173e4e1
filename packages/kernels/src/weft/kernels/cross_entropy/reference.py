"""The two passes over the logits in plain torch: the CPU path, and the meaning of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 20  # logits widened to float32 at a time: 4 MiB a temporary, whatever the number of rows


def statistics(logits: Tensor, target: Tensor, *, vocab_start: int, vocab_size: int, ignore_index: int) -> Tensor:
    """What each row of this shard contributes to the loss: [N, 3], float32 (float64 for float64 logits).

    The columns: over all classes but the target, the largest logit and the sum of exp(logit - largest), which are -inf
    and 0 where there is no class or all are -inf; then the target's logit, 0 if another shard holds it.
    A row to ignore gives -inf, 0, 0. A target that is no class makes the sum NaN.
    The target is kept out of the sum because beside exp(0) of a likely class float32 drops the unlikely ones, and
    their sum is 1 - p: the loss and the gradient of the true class.
    """
    V = logits.shape[-1]
    classes = target.reshape(-1).long()  # [N]
    out = torch.empty(len(classes), 3, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    out[:, 0], out[:, 1], out[:, 2] = -torch.inf, 0, 0
    if V > 0:
        x = logits.reshape(-1, V)  # [N, V]
        for rows in _chunks(len(classes), V):
            wide = x[rows].to(out.dtype)
            local = classes[rows] - vocab_start
            is_here = (local >= 0) & (local < V)
            index = local.clamp(0, V - 1).unsqueeze(1)
            logit = wide.gather(1, index)
            out[rows, 2] = logit.squeeze(1).where(is_here, 0)
            others = wide.scatter(1, index, logit.masked_fill(is_here.unsqueeze(1), -torch.inf))
            out[rows, 0] = others.amax(-1)
            out[rows, 1] = others.sub_(_finite(out[rows, :1])).exp_().sum(-1)
    out[:, 1].masked_fill_((classes < 0) | (classes >= vocab_size), torch.nan)
    ignored = (classes == ignore_index).unsqueeze(1)  # [N, 1]
    return torch.where(ignored, out.new_tensor([-torch.inf, 0, 0]), out)


def merge(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics [shards, N, 3] of all shards as one: largest, log_sum and log_odds, each [N].

    log_sum is of exp(logit - largest) over all classes, so logsumexp is largest + log_sum. They stay apart because
    their sum rounds at the size of the logits. Where every logit is -inf, largest is 0 and log_sum is -inf.
    log_odds is log((1 - p) / p) for the p of the true class: the loss is softplus(log_odds), and p - 1 is
    -sigmoid(log_odds), both accurate for p near 1.
    The result depends on nothing but the statistics, so ranks that gathered the same numbers get the same bits.
    """
    others, sums, target_logits = statistics.unbind(-1)  # [shards, N] each
    other, target_logit = others.amax(0), target_logits.sum(0)
    other_sum = (sums * (others - _finite(other)).exp()).sum(0)
    largest = _finite(torch.maximum(other, target_logit))
    other, target_logit = other - largest, target_logit - largest  # one of the two is 0
    log_sum = (other_sum * other.exp() + target_logit.exp()).log()
    return largest, log_sum, (other - target_logit) + other_sum.log()


def gradient(
    logits: Tensor, target: Tensor, largest: Tensor, log_sum: Tensor, scale: Tensor, true: Tensor, *, vocab_start: int
) -> Tensor:
    """The gradient of this shard's logits, in their shape and dtype, contiguous, in memory of its own.

    scale * exp(logit - largest - log_sum), except `true` at the true class; rows of scale 0 are exactly 0.
    largest, log_sum, scale, true: [N] each, over all classes.
    """
    V = logits.shape[-1]
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    x, dx = logits.reshape(-1, V), out.view(-1, V)  # [N, V] both
    local = target.reshape(-1).long() - vocab_start  # [N]
    is_here = (local >= 0) & (local < V)
    for rows in _chunks(len(local), V):
        wide = x[rows].to(scale.dtype)
        wide = (wide - largest[rows, None]).sub_(log_sum[rows, None]).exp_().mul_(scale[rows, None])
        index = local[rows].clamp(0, V - 1).unsqueeze(1)
        wide.scatter_(1, index, torch.where(is_here[rows, None], true[rows, None], wide.gather(1, index)))
        dx[rows] = wide.masked_fill_(scale[rows, None] == 0, 0)
    return out


def _finite(largest: Tensor) -> Tensor:
    """What to subtract before exp: the largest logit, or 0 where it is -inf and the difference would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _chunks(N: int, V: int) -> Iterator[slice]:
    step = max(1, CHUNK // V)
    return (slice(start, start + step) for start in range(0, N, step))
