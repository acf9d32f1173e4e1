"""Combines all shards' statistics into each row's loss, logsumexp, accuracy and gradient scalars.

The columns of the statistics are lse_hi and lse_lo (whose sum is the logsumexp without the target) and target_logit;
with label smoothing, logit_sum and logit_sum_lo; with the accuracy, the rival of `find_rival`. See
`reference.statistics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import Options


@dataclass(frozen=True, slots=True)
class LossShard:
    """A shard's place in the vocabulary, and the options of the loss.

    Made in each forward and each backward of cross-entropy and linear cross-entropy, for the rank's shard.
    """

    start: int  # id of the shard's first class
    vocab_size: int
    options: Options
    none_ignored: bool = False  # whether the host knows that every target is a class and not ignore_index; from `check`

    def part(self, weight: Tensor, V: int) -> Tensor:
        """The weights of this shard's V classes, from the weights of all classes."""
        return weight[self.start : self.start + V]


@dataclass(frozen=True, slots=True)
class Upstream:
    """The upstream gradients of a call, and the denominator of the reduction "mean".

    Made in backward. Also made in a forward which computes the logits' gradient in advance: `loss` is then a guess of
    the upstream gradient (`guess.py`), or 1 in linear cross-entropy.
    """

    loss: Tensor | None  # a scalar, or a number per row; not yet divided by `denominator`. None stands for zeros
    lse: Tensor | None = None  # a number per row; None stands for zeros
    denominator: Tensor | None = None  # a scalar, which divides `loss`; None: nothing is divided

    def of(self, rows: slice) -> Upstream:
        """The upstream gradients of some rows of the flattened logits. Called for each chunk of rows of a gradient."""
        if self.lse is None and (self.loss is None or self.loss.ndim == 0):
            return self
        loss, lse = (
            each if each is None or each.ndim == 0 else each.reshape(-1)[rows] for each in (self.loss, self.lse)
        )
        return Upstream(loss, lse, self.denominator)


class MergedStatistics(NamedTuple):
    """The combined statistics of all shards, each [N] in float64. Made by `merge`, which explains the fields."""

    base: Tensor
    log_sum: Tensor
    log_odds: Tensor


def merge(statistics: Tensor) -> MergedStatistics:
    """Combine the first three statistics of `statistics` [shards, N, 3 to 6].

    Called in plain torch by `losses`, and for each chunk of rows before `gradient_factors`. Triton kernels combine the
    statistics themselves.
    lse_hi + lse_lo is a shard's logsumexp without the target; lse_lo is the rounding error of lse_hi.

    base: the largest lse_hi or the target's logit, whichever is larger. If every logit is -inf, base is 0 and log_sum
        is -inf.
    log_sum: log of the sum of exp(logit - base) over all classes. The logsumexp is base + log_sum. The two are kept
        apart: beside a large base, the sum would lose digits of log_sum.
    log_odds: log((1 - p) / p), for the target's softmax p. The loss is softplus(log_odds), and p - 1 is
        -sigmoid(log_odds); both are accurate for p near 1.

    All are float64, which is cheap: the numbers are few next to the logits. The result depends on the statistics alone:
    ranks with the same gathered numbers get the same bits.
    """
    if statistics.shape[0] == 1:
        lse_hi, lse_lo, target_logit, *_ = statistics[0].double().unbind(-1)  # [N] each
        base = replace_minus_infinity(torch.maximum(lse_hi, target_logit))
        non_target_lse = (lse_hi - base).add_(lse_lo)
    else:
        lse_hi, lse_lo, target_logits, *_ = statistics.double().unbind(-1)  # [shards, N] each
        target_logit = target_logits.sum(0)
        base = replace_minus_infinity(torch.maximum(lse_hi.amax(0), target_logit))
        non_target_lse = ((lse_hi - base) + lse_lo).logsumexp(0)
    target_logit = target_logit - base  # NaN for a target logit of +inf
    return MergedStatistics(base, torch.logaddexp(non_target_lse, target_logit), non_target_lse - target_logit)


def replace_minus_infinity(largest: Tensor) -> Tensor:
    """Replace -inf by 0 in `largest`, the number subtracted before exp, because -inf - -inf is NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def losses(
    statistics: Tensor, target: Tensor, weight: Tensor | None, shard: LossShard, merged: MergedStatistics | None = None
) -> tuple[Tensor, Tensor | None]:
    """The loss and the logsumexp of each row, both 0 for ignored rows, in the target's shape.

    statistics: [shards, N, 3 to 6] of all shards. weight: of all classes of the vocabulary; None: 1 each. merged: the
    result of `merge`, if known.
    The logsumexp is None unless options.gives_lse.
    """
    options = shard.options
    base, log_sum, log_odds = merged or merge(statistics)
    lse = base + log_sum if options.z_loss or options.gives_lse else None
    loss = F.softplus(log_odds, threshold=100)  # above the threshold, log_odds itself
    if weight is not None:
        loss = loss * weigh_targets(weight, target.reshape(-1).long(), options.ignore_index, loss.dtype)
    if shard.options.label_smoothing:
        weight_sum = shard.vocab_size if weight is None else weight.to(loss.dtype).sum()
        # In float64: a constant added to all logits makes weight_sum * base and logit_sum large, and leaves their
        # difference unchanged.
        logit_sum = statistics[..., 3:5].double().sum((0, 2))
        uniform = (weight_sum * base - logit_sum) / shard.vocab_size + (weight_sum / shard.vocab_size) * log_sum
        # uniform: the loss for a uniform target
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * uniform
    if options.z_loss:
        assert lse is not None, "computed above for z_loss"
        loss = loss + options.z_loss * lse.square()
    # long: in int32, a large ignore_index would be cut
    ignored = None if shard.none_ignored else target.long() == options.ignore_index

    def as_target(each: Tensor) -> Tensor:
        """`each` in the target's shape, 0 for ignored tokens.

        Always makes a new tensor: autograd forbids the user to change a view in place, if the view is an output of a
        function with several outputs.
        """
        each = each.view(target.shape).to(statistics.dtype, copy=ignored is None)
        return each if ignored is None else each.masked_fill(ignored, 0)

    return as_target(loss), as_target(lse) if lse is not None and options.gives_lse else None


def weigh_targets(weight: Tensor | None, classes: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class [N], 0 for ignored tokens.

    Called for the loss and the gradient in plain torch, and to sum the weights for the reduction "mean"
    (`mean_denominator`, and `criterion.py` of `weft.models`).
    weight: of the classes; None: 1 each. A target outside the vocabulary gets the nearest class's weight: the loss is
    NaN already.
    """
    if weight is None:
        return (classes != ignore_index).to(dtype)
    if len(weight) == 0:
        return torch.zeros(len(classes), dtype=dtype, device=classes.device)
    return weight[classes.long().clamp(0, len(weight) - 1)].to(dtype).masked_fill(classes == ignore_index, 0)


@dataclass(frozen=True, slots=True)
class RowFactors:
    """The scalars of each row's gradient. Made by `gradient_factors` for a chunk of N rows.

    [N] in float64; softmax_scale and smoothing may be [1], for a value equal in all rows.
    A class's gradient is softmax_scale * softmax - smoothing * weight; the target's is target_grad.
    """

    base: Tensor  # from `merge`: the logsumexp is base + log_sum
    log_sum: Tensor
    softmax_scale: Tensor
    target_grad: Tensor
    smoothing: Tensor | None  # None without label smoothing


def gradient_factors(
    merged: MergedStatistics, classes: Tensor, weight: Tensor | None, upstream: Upstream, shard: LossShard
) -> RowFactors:
    """The scalars of each row's gradient, from the merged statistics, target classes [N] and upstream gradients.

    Called in plain torch for each chunk of rows, when the logits' gradient is computed: in backward, or in forward.
    merged, upstream: of the chunk.
    """
    options = shard.options
    base, log_sum, log_odds = merged
    ignored = None if shard.none_ignored else classes == options.ignore_index

    def zero_if_ignored(each: Tensor) -> Tensor:
        """`each` with 0 in ignored rows, whose values may be NaN."""
        return each if ignored is None else each.masked_fill(ignored, 0)

    if upstream.loss is None:
        grad = torch.zeros_like(log_sum)
    else:
        grad = upstream.loss.to(log_sum.dtype)
        grad = grad if upstream.denominator is None else grad / upstream.denominator
        grad = zero_if_ignored(grad.reshape(-1))  # [N], or [1] for all rows
    # The gradient is nll_scale * (softmax - one-hot) + lse_scale * softmax - smoothing * weight. So softmax_scale is
    # nll_scale + lse_scale.
    nll_scale = grad if weight is None else grad * weigh_targets(weight, classes, options.ignore_index, grad.dtype)
    lse_scale = smoothing = None  # lse_scale: the gradient of the logsumexp, by z_loss, smoothing and the lse output
    target_grad = None
    if shard.options.label_smoothing:
        smoothing = grad * (options.label_smoothing / shard.vocab_size)
        lse_scale = smoothing * (shard.vocab_size if weight is None else weight.to(grad.dtype).sum())
        target_grad = (
            -smoothing
            if weight is None
            else -smoothing * weigh_targets(weight, classes, options.ignore_index, grad.dtype)
        )
        nll_scale = nll_scale * (1 - options.label_smoothing)
    if options.z_loss:
        lse_part = 2 * options.z_loss * zero_if_ignored(base + log_sum) * grad
        lse_scale = lse_part if lse_scale is None else lse_scale + lse_part
    if upstream.lse is not None:
        lse_part = zero_if_ignored(upstream.lse.reshape(-1).to(grad.dtype))
        lse_scale = lse_part if lse_scale is None else lse_scale + lse_part
    nll_at_target = nll_scale * torch.sigmoid(log_odds)
    if lse_scale is not None:
        nll_at_target = nll_at_target - lse_scale * torch.sigmoid(-log_odds)
    target_grad = -nll_at_target if target_grad is None else target_grad - nll_at_target
    softmax_scale = nll_scale if lse_scale is None else nll_scale + zero_if_ignored(lse_scale)
    return RowFactors(base, log_sum, softmax_scale, zero_if_ignored(target_grad), smoothing)


def find_rival(z: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, 1]: the smallest target logit for which torch.argmax returns the target, in `dtype`.

    torch.argmax returns the first of equal logits. So the target's logit must be at least the largest logit of the
    classes after the target, and at least the next float above the largest logit of the classes before.

    Called in plain torch for each chunk of n rows, with the shard's statistics.
    z: the shard's logits after logit_scale and softcap [n, V], -inf at the target.
    target: the target's column [n, 1]; negative, or V or more, if another shard has the target.
    """
    is_before = torch.arange(z.shape[1], device=z.device) < target  # [n, V]
    before, largest = (each.amax(-1, keepdim=True).to(dtype) for each in (z.masked_fill(~is_before, -torch.inf), z))
    return torch.where(before == largest, before.nextafter(before.new_full((), torch.inf)), largest)


def find_correct(statistics: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """1 for each token whose logits' torch.argmax is the target; 0 for all further tokens, and for ignored tokens.

    Returns the shape of `target`. Of equal logits the first counts.

    statistics: [shards, N, columns] of all shards; the last column is the rival of `find_rival`.
    """
    first = statistics[..., 2].sum(0) >= statistics[..., -1].amax(0)
    return (first & (target.reshape(-1).long() != ignore_index)).to(statistics.dtype).view(target.shape)
