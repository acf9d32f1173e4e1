"""The numbers of each row, from the statistics of all shards: its loss, and the scalars of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import Options


@dataclass(frozen=True, slots=True)
class Shard:
    """The classes `start` to `start + V` of `size`, and what is asked of them.

    Logits are scaled first: x becomes scale * x, and with a softcap cap * tanh(scale * x / cap).
    all_count: whether the host knows that every target is a class, and none is to be ignored; see `check`.
    """

    start: int
    size: int
    options: Options
    all_count: bool = False

    @property
    def sums(self) -> bool:
        """Whether the sum of the logits is wanted."""
        return self.options.label_smoothing > 0

    def part(self, weight: Tensor, V: int) -> Tensor:
        """The weights of this shard's classes, of those of all."""
        return weight[self.start : self.start + V]


@dataclass(frozen=True, slots=True)
class Upstream:
    """The gradients that arrive: of the loss, a scalar or one number a row, which `denominator` divides; and of the lse.

    None for a gradient of zeros.
    """

    loss: Tensor | None
    lse: Tensor | None = None
    denominator: Tensor | None = None

    def of(self, rows: slice) -> Upstream:
        """Those of some rows."""
        if self.lse is None and (self.loss is None or self.loss.ndim == 0):
            return self
        loss, lse = (
            each if each is None or each.ndim == 0 else each.reshape(-1)[rows] for each in (self.loss, self.lse)
        )
        return Upstream(loss, lse, self.denominator)


class Merged(NamedTuple):
    """The statistics of all shards as one, each [N] in float64: see `merge`."""

    base: Tensor
    log_sum: Tensor
    log_odds: Tensor


def merge(statistics: Tensor) -> Merged:
    """Of the first three statistics [shards, N, 3 to 6] of all shards.

    base: the largest of the shards' lse_hi and the target's logit. Where every logit is -inf it is 0, and log_sum is -inf.
    log_sum: log of the sum of exp(logit - base) over all classes. The logsumexp is base + log_sum. The two stay apart, because
    their sum is rounded to the precision of a number as large as the logits.
    log_odds: log((1 - p) / p), where p is the target's softmax. The loss is softplus(log_odds), and p - 1 is -sigmoid(log_odds);
    both are accurate for p near 1.
    All are float64. There are few of them beside the logits.
    The result depends on nothing but the statistics, so ranks that gathered the same numbers get the same bits.
    """
    if len(statistics) == 1:
        lse_hi, lse_lo, target_logit, *_ = statistics[0].double().unbind(-1)  # [N] each
        base = finite(torch.maximum(lse_hi, target_logit))
        non_target_lse = (lse_hi - base).add_(lse_lo)
    else:
        lse_hi, lse_lo, target_logits, *_ = statistics.double().unbind(-1)  # [shards, N] each
        target_logit = target_logits.sum(0)
        base = finite(torch.maximum(lse_hi.amax(0), target_logit))
        non_target_lse = ((lse_hi - base) + lse_lo).logsumexp(0)
    target_logit = target_logit - base  # an infinite logit gives NaN
    return Merged(base, torch.logaddexp(non_target_lse, target_logit), non_target_lse - target_logit)


def finite(largest: Tensor) -> Tensor:
    """What to subtract before exp: the largest logit, or 0 where it is -inf and the difference would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def losses(
    statistics: Tensor, target: Tensor, weight: Tensor | None, shard: Shard, merged: Merged | None = None
) -> tuple[Tensor, Tensor | None]:
    """The loss and the logsumexp of each row, of the target's shape, from the statistics [shards, N, 3 to 6] of all shards.

    weight: [size]. merged: as `merge` gives it, where that is known.
    Both are 0 at an ignored row. The logsumexp is None where no output needs it.
    """
    options = shard.options
    base, log_sum, log_odds = merged or merge(statistics)
    lse = base + log_sum if options.z_loss or options.gives_lse else None
    classes = target.reshape(-1).long()
    loss = F.softplus(log_odds, threshold=100)  # above it log_odds itself
    if weight is not None:
        loss = loss * of_target(weight, classes, options.ignore_index, loss.dtype)
    if shard.sums:
        weight_sum = shard.size if weight is None else weight.to(loss.dtype).sum()
        # Both terms grow with the number of classes: each is divided by it before they are subtracted.
        logit_sum = statistics[..., 3:5].double().sum((0, 2))
        uniform = (weight_sum * base - logit_sum) / shard.size + (weight_sum / shard.size) * log_sum
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * uniform  # the loss of a uniform target
    if options.z_loss:
        assert lse is not None, "it is made above"
        loss = loss + options.z_loss * lse.square()
    ignored = None if shard.all_count else (classes == options.ignore_index).view(target.shape)

    def of_tokens(each: Tensor) -> Tensor:
        """In the target's shape, 0 at an ignored token. The last step makes a new tensor: autograd does not let a caller change an
        output in place where it is a view.
        """
        each = each.view(target.shape).to(statistics.dtype, copy=ignored is None)
        return each if ignored is None else each.masked_fill(ignored, 0)

    return of_tokens(loss), of_tokens(lse) if lse is not None and options.gives_lse else None


def of_target(weight: Tensor | None, classes: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class, [N]; 0 at an ignored token. A target that is no class takes the nearest class's: its
    loss is NaN already.
    """
    if weight is None:
        return (classes != ignore_index).to(dtype)
    if len(weight) == 0:
        return torch.zeros(len(classes), dtype=dtype, device=classes.device)
    return weight[classes.long().clamp(0, len(weight) - 1)].to(dtype).masked_fill(classes == ignore_index, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The scalars of each row's gradient, in float64, each [N], or [1] where it is the same in all rows.

    The gradient is softmax_scale * softmax - smoothing * weight, and target_grad at the target.
    base, log_sum: as `merge` gives them; the logsumexp is their sum. smoothing: None without label smoothing.
    """

    base: Tensor
    log_sum: Tensor
    softmax_scale: Tensor
    target_grad: Tensor
    smoothing: Tensor | None


def rows(merged: Merged, classes: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard) -> Rows:
    """From the statistics of all shards, the target classes [N] and the gradients that arrive."""
    options = shard.options
    base, log_sum, log_odds = merged
    ignored = None if shard.all_count else classes == options.ignore_index

    def counted(each: Tensor) -> Tensor:
        """The same, but 0 at an ignored row, where it may be NaN."""
        return each if ignored is None else each.masked_fill(ignored, 0)

    if upstream.loss is None:
        grad = torch.zeros_like(log_sum)
    else:
        grad = upstream.loss.to(log_sum.dtype)
        grad = grad if upstream.denominator is None else grad / upstream.denominator
        grad = counted(grad.reshape(-1))  # [N], or [1] for all rows
    # The gradient is nll_scale * (softmax - one-hot) + lse_scale * softmax - smoothing * weight.
    # Of the softmax that is softmax_scale = nll_scale + lse_scale.
    nll_scale = grad if weight is None else grad * of_target(weight, classes, options.ignore_index, grad.dtype)
    lse_scale = smoothing = None  # lse_scale: of z_loss and of the lse
    target_grad = None
    if shard.sums:
        smoothing = grad * (options.label_smoothing / shard.size)
        lse_scale = smoothing * (shard.size if weight is None else weight.to(grad.dtype).sum())
        target_grad = (
            -smoothing if weight is None else -smoothing * of_target(weight, classes, options.ignore_index, grad.dtype)
        )
        nll_scale = nll_scale * (1 - options.label_smoothing)
    if options.z_loss:
        of_lse = 2 * options.z_loss * counted(base + log_sum) * grad
        lse_scale = of_lse if lse_scale is None else lse_scale + of_lse
    if upstream.lse is not None:
        of_lse = counted(upstream.lse.reshape(-1).to(grad.dtype))
        lse_scale = of_lse if lse_scale is None else lse_scale + of_lse
    nll_at_target = nll_scale * torch.sigmoid(log_odds)
    if lse_scale is not None:
        nll_at_target = nll_at_target - lse_scale * torch.sigmoid(-log_odds)
    target_grad = -nll_at_target if target_grad is None else target_grad - nll_at_target
    softmax_scale = nll_scale if lse_scale is None else nll_scale + counted(lse_scale)
    return Rows(base, log_sum, softmax_scale, counted(target_grad), smoothing)
