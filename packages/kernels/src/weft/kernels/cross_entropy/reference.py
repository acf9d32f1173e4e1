"""The two passes over the logits in plain torch: the CPU path, and the meaning of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 20  # logits widened to float32 at a time: 4 MiB a temporary, whatever the number of rows


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a shard lies in the vocabulary, and what its logits count as.

    The classes `start` to `start + V` of `size`. A logit x counts as scale * x, and where there is a cap as
    cap * tanh(scale * x / cap). sums: whether the sum of the logits is wanted.
    """

    start: int
    size: int
    ignore_index: int
    scale: float = 1.0
    cap: float | None = None
    sums: bool = False

    @property
    def columns(self) -> int:
        """Statistics of a row."""
        return 4 if self.sums else 3


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> Tensor:
    """What each row of this shard contributes to the loss: [N, 3 or 4], float32 (float64 for float64 logits).

    The columns: over all classes but the target, the largest logit and the sum of exp(logit - largest), which are -inf
    and 0 where there is no class or all are -inf; then the target's logit, 0 if another shard holds it; then, where
    sums are wanted, the sum of all logits, each times its class's weight where there are weights: [V] of this shard.
    A row to ignore gives -inf, 0, 0, 0. A target that is no class makes the second NaN.
    The target is kept out of the sum because beside exp(0) of a likely class float32 drops the unlikely ones, and
    their sum is 1 - p: the loss and the gradient of the true class.
    """
    V = logits.shape[-1]
    classes = target.reshape(-1).long()  # [N]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    nothing = torch.tensor([-torch.inf, 0, 0, 0][: shard.columns], dtype=dtype, device=logits.device)
    out = nothing.repeat(len(classes), 1)
    if V > 0:
        x = logits.reshape(-1, V)  # [N, V]
        for rows in _chunks(len(classes), V):
            z = _counted(x[rows].to(dtype), shard)
            if shard.sums:
                out[rows, 3] = z.sum(-1) if weight is None else (z * weight.to(dtype)).sum(-1)
            local = classes[rows] - shard.start
            is_here = (local >= 0) & (local < V)
            index = local.clamp(0, V - 1).unsqueeze(1)
            logit = z.gather(1, index)
            out[rows, 2] = logit.squeeze(1).where(is_here, 0)
            others = z.scatter(1, index, logit.masked_fill(is_here.unsqueeze(1), -torch.inf))
            out[rows, 0] = others.amax(-1)
            out[rows, 1] = others.sub_(_finite(out[rows, :1])).exp_().sum(-1)
    out[:, 1].masked_fill_((classes < 0) | (classes >= shard.size), torch.nan)
    return torch.where((classes == shard.ignore_index).unsqueeze(1), nothing, out)


def merge(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first three statistics [shards, N, 3] of all shards as one: largest, log_sum and log_odds, each [N].

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


@dataclass(frozen=True, slots=True)
class Rows:
    """What the gradient of a row is made of, each [N]: factor * softmax - spread * weight, and `true` at the true class.

    largest, log_sum: as `merge` gives them. spread: where sums are wanted, otherwise None.
    """

    largest: Tensor
    log_sum: Tensor
    factor: Tensor
    true: Tensor
    spread: Tensor | None


def gradient(logits: Tensor, target: Tensor, weight: Tensor | None, rows: Rows, shard: Shard, out: Tensor) -> Tensor:
    """The gradient of this shard's logits, written to `out`, contiguous, which may be `logits`; returned.

    The gradient of what a logit counts as, see `Rows`, times the derivative of that. Rows whose factor, spread and true
    are 0 are exactly 0.
    """
    V = logits.shape[-1]
    if out.numel() == 0:
        return out
    x, dx = logits.reshape(-1, V), out.view(-1, V)  # [N, V] both
    local = target.reshape(-1).long() - shard.start  # [N]
    is_here = (local >= 0) & (local < V)
    dead = (rows.factor == 0) & (rows.true == 0)
    if rows.spread is not None:
        dead &= rows.spread == 0
    for some in _chunks(len(local), V):
        z, slope = _bent(x[some].to(rows.factor.dtype), shard)
        wide = (z - rows.largest[some, None]).sub_(rows.log_sum[some, None]).exp_().mul_(rows.factor[some, None])
        if rows.spread is not None:
            wide -= rows.spread[some, None] * (1 if weight is None else weight.to(wide.dtype))
        index = local[some].clamp(0, V - 1).unsqueeze(1)
        wide.scatter_(1, index, torch.where(is_here[some, None], rows.true[some, None], wide.gather(1, index)))
        dx[some] = wide.mul_(slope).masked_fill_(dead[some, None], 0)
    return out


def _counted(x: Tensor, shard: Shard) -> Tensor:
    z = x if shard.scale == 1 else x * shard.scale
    return z if shard.cap is None else (z / shard.cap).tanh_().mul_(shard.cap)


def _bent(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor | float]:
    """What the logits count as, and its derivative."""
    z = _counted(x, shard)
    if shard.cap is None:
        return z, shard.scale
    e = (x * (shard.scale / shard.cap)).abs_().mul_(-2).exp_()
    return z, 4 * shard.scale * e / (1 + e).square_()  # 1 - tanh**2, which as a difference would lose its digits


def _finite(largest: Tensor) -> Tensor:
    """What to subtract before exp: the largest logit, or 0 where it is -inf and the difference would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _chunks(N: int, V: int) -> Iterator[slice]:
    step = max(1, CHUNK // V)
    return (slice(start, start + step) for start in range(0, N, step))
