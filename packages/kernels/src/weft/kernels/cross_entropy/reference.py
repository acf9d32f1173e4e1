"""The passes over the logits in plain torch: the CPU path, and the meaning of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import Options

CHUNK = 1 << 20  # logits widened at a time: 4 MiB a temporary in float32, whatever the number of rows


@dataclass(frozen=True, slots=True)
class Shard:
    """The classes `start` to `start + V` of `size`, and what is asked of them.

    A logit x counts as scale * x, and where there is a cap as cap * tanh(scale * x / cap).
    """

    start: int
    size: int
    options: Options

    @property
    def sums(self) -> bool:
        """Whether the sum of the logits is wanted."""
        return self.options.label_smoothing > 0

    @property
    def columns(self) -> int:
        """Statistics of a row."""
        return 4 if self.sums else 3

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


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> Tensor:
    """What each row of this shard contributes to the loss: [N, 3 or 4], float32 (float64 for float64 logits).

    The columns: logsumexp over all classes but the target, and what float32 rounds away of it, which are -inf and 0 where
    there is no class or all are -inf; then the target's logit, 0 if another shard holds it; then, where sums are wanted,
    the sum of all logits, each times its class's weight where there are weights: [size], of all classes.
    A row to ignore gives -inf, 0, 0, 0. A target that is no class makes the second NaN.
    The target is kept out of the sum because beside exp(0) of a likely class float32 drops the unlikely ones, and
    their sum is 1 - p: the loss and the gradient of the true class.
    """
    V = logits.shape[-1]
    classes = target.reshape(-1).long()  # [N]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    nothing = torch.zeros(shard.columns, dtype=dtype, device=logits.device)
    nothing[0].fill_(-torch.inf)
    out = nothing.repeat(len(classes), 1)
    if V > 0:
        x = logits.reshape(-1, V)  # [N, V]
        for some in _chunks(len(classes), V):
            z = _counted(x[some].to(_wide(logits.dtype)), shard)
            if shard.sums:
                out[some, 3] = z.sum(-1) if weight is None else (z * shard.part(weight, V).to(z.dtype)).sum(-1)
            local = classes[some] - shard.start
            is_here = (local >= 0) & (local < V)
            index = local.clamp(0, V - 1).unsqueeze(1)
            logit = z.gather(1, index)
            out[some, 2] = logit.squeeze(1).where(is_here, 0)
            others = z.scatter(1, index, logit.masked_fill(is_here.unsqueeze(1), -torch.inf))
            largest = _finite(others.amax(-1, keepdim=True))
            total = others.sub_(largest).exp_().sum(-1)
            largest, log_total = largest.squeeze(1).double(), total.double().log()
            out[some, 0] = largest + log_total
            out[some, 1] = ((largest - out[some, 0]) + log_total).masked_fill_(total == 0, 0)
    out[:, 1].masked_fill_((classes < 0) | (classes >= shard.size), torch.nan)
    return torch.where((classes == shard.options.ignore_index).unsqueeze(1), nothing, out)


def merge(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first three statistics [shards, N, 3] of all shards as one: largest, log_sum and log_odds, each [N].

    log_sum is of exp(logit - largest) over all classes, so logsumexp is largest + log_sum. They stay apart because
    their sum rounds at the size of the logits. Where every logit is -inf, largest is 0 and log_sum is -inf.
    log_odds is log((1 - p) / p) for the p of the true class: the loss is softplus(log_odds), and p - 1 is
    -sigmoid(log_odds), both accurate for p near 1. All in float64: it is little beside the logits.
    The result depends on nothing but the statistics, so ranks that gathered the same numbers get the same bits.
    """
    others, lows, target_logits = statistics.double().unbind(-1)  # [shards, N] each
    other, target_logit = others.amax(0), target_logits.sum(0)
    other_sum = ((others - _finite(other)) + lows).exp().sum(0)
    largest = _finite(torch.maximum(other, target_logit))
    other, target_logit = other - largest, target_logit - largest  # one of the two is 0
    log_sum = (other_sum * other.exp() + target_logit.exp()).log()
    return largest, log_sum, (other - target_logit) + other_sum.log()


def losses(statistics: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> tuple[Tensor, Tensor]:
    """The loss and the logsumexp of each row, of the target's shape, from the statistics [shards, N, 3 or 4] of all shards.

    weight: [size]. Both are 0 at a row to ignore.
    """
    options = shard.options
    largest, log_sum, log_odds = merge(statistics[..., :3])
    classes = target.reshape(-1).long()
    ignored = classes == options.ignore_index
    share = of_target(weight, classes, options.ignore_index, log_sum.dtype)
    loss = -F.logsigmoid(-log_odds) * share * (1 - options.label_smoothing)
    if shard.sums:
        whole = shard.size if weight is None else weight.to(loss.dtype).sum()
        # Each over the size before they are subtracted: both grow with it.
        others = (whole * largest - statistics[..., 3].sum(0)) / shard.size + (whole / shard.size) * log_sum
        loss = loss + options.label_smoothing * others
    lse = largest + log_sum
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    # Masked last: autograd forbids changing a view in place where it is an output.
    ignored, loss, lse = ignored.view(target.shape), *(x.to(statistics.dtype).view(target.shape) for x in (loss, lse))
    return loss.masked_fill(ignored, 0), lse.masked_fill(ignored, 0)


def of_target(weight: Tensor | None, classes: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class, [N]; 0 at a token to ignore. A target that is no class has made the loss NaN."""
    ignored = classes.long() == ignore_index
    if weight is None:
        return (~ignored).to(dtype)
    if len(weight) == 0:
        return torch.zeros(len(classes), dtype=dtype, device=classes.device)
    return weight[classes.long().clamp(0, len(weight) - 1)].to(dtype).masked_fill(ignored, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """What the gradient of a row is made of, each [N] in float64: factor * softmax - spread * weight, and `true` at the true class.

    largest, log_sum: as `merge` gives them. spread: where sums are wanted, otherwise None.
    """

    largest: Tensor
    log_sum: Tensor
    factor: Tensor
    true: Tensor
    spread: Tensor | None


def rows(statistics: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard) -> Rows:
    """From the statistics of all shards and the gradients that arrive."""
    options = shard.options
    largest, log_sum, log_odds = merge(statistics[..., :3])
    classes = target.reshape(-1).long()
    ignored = classes == options.ignore_index
    grad = torch.zeros_like(log_sum)
    if upstream.loss is not None:
        grad = upstream.loss.to(log_sum.dtype)
        grad = grad if upstream.denominator is None else grad / upstream.denominator
    grad = torch.where(ignored, 0, grad.reshape(-1))
    # d loss / d logit of class c = factor * p_c - spread * weight_c, and for the true class - pull more.
    share = of_target(weight, classes, options.ignore_index, grad.dtype)
    pull = grad * share * (1 - options.label_smoothing)
    even = torch.zeros_like(grad)  # what reaches all classes by their probability, besides the pull
    spread = None
    if shard.sums:
        spread = grad * (options.label_smoothing / shard.size)
        even = even + spread * (shard.size if weight is None else weight.to(grad.dtype).sum())
    if options.z_loss:
        even = even + 2 * options.z_loss * torch.where(ignored, 0, largest + log_sum) * grad
    if upstream.lse is not None:
        even = even + torch.where(ignored, 0, upstream.lse.reshape(-1).to(grad.dtype))
    true = even * torch.sigmoid(-log_odds) - pull * torch.sigmoid(log_odds)
    if spread is not None:
        true = true - spread * share
    return Rows(largest, log_sum, pull + even, torch.where(ignored, 0, true), spread)


def gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    out: Tensor,
) -> Tensor:
    """The gradient of this shard's logits, written to `out`, contiguous, which may be `logits`; returned.

    The gradient of what a logit counts as, see `Rows`, times the derivative of that. Rows whose factor, spread and true
    are 0 are exactly 0.
    """
    V, wide = logits.shape[-1], _wide(logits.dtype)
    if out.numel() == 0:
        return out
    row = rows(statistics, target, weight, upstream, shard)
    x, dx = logits.reshape(-1, V), out.view(-1, V)  # [N, V] both
    local = target.reshape(-1).long() - shard.start  # [N]
    is_here = (local >= 0) & (local < V)
    dead = (row.factor == 0) & (row.true == 0)
    if row.spread is not None:
        dead &= row.spread == 0
    for some in _chunks(len(local), V):
        z, slope = _bent(x[some].to(wide), shard)
        largest, log_sum, factor, true = (
            each[some, None].to(wide) for each in (row.largest, row.log_sum, row.factor, row.true)
        )
        each = (z - largest).sub_(log_sum).exp_().mul_(factor)
        if row.spread is not None:
            each -= row.spread[some, None].to(wide) * (1 if weight is None else shard.part(weight, V).to(wide))
        index = local[some].clamp(0, V - 1).unsqueeze(1)
        each.scatter_(1, index, torch.where(is_here[some, None], true, each.gather(1, index)))
        dx[some] = each.mul_(slope).masked_fill_(dead[some, None], 0)
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard, out: Tensor
) -> Tensor:
    """The statistics [N, 3 or 4] of the one shard that there is; its gradient, from the same numbers, in `out`."""
    found = statistics(logits, target, weight, shard)
    gradient(logits, target, weight, found.unsqueeze(0), upstream, shard, out)
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What the passes compute in, to round once: wider than the logits."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _counted(x: Tensor, shard: Shard) -> Tensor:
    scale, cap = shard.options.logit_scale, shard.options.softcap
    z = x if scale == 1 else x * scale
    return z if cap is None else (z / cap).tanh_().mul_(cap)


def _bent(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor | float]:
    """What the logits count as, and its derivative."""
    z = _counted(x, shard)
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if cap is None:
        return z, scale
    e = (x * (scale / cap)).abs_().mul_(-2).exp_()
    return z, 4 * scale * e / (1 + e).square_()  # 1 - tanh**2, which as a difference would lose its digits


def _finite(largest: Tensor) -> Tensor:
    """What to subtract before exp: the largest logit, or 0 where it is -inf and the difference would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _chunks(N: int, V: int) -> Iterator[slice]:
    step = max(1, CHUNK // V)
    return (slice(start, start + step) for start in range(0, N, step))
