"""The passes over the logits in plain torch: the CPU path, and the meaning of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import can_read
from . import guess
from .accuracy import rival
from .options import Options

# Logits widened at a time by each thread: 4 MiB in float64, which stay in the L3. A chunk's numbers per row cost the host some
# 0.1 ms, whatever its size.
CHUNK = 1 << 19
LOG2_E = math.log2(math.e)  # exp(x) is exp2(x * LOG2_E), which takes a CPU three quarters of the time of exp
# No base needs to be subtracted from the logits of a row whose sum of exponentials is between these: nothing overflows, and the
# share of the sum of what underflows is below what the gradient's dtype holds. By the dtype of the logits.
SUMS = {
    torch.float64: (1.0, math.exp(600)),
    torch.float32: (math.exp(-600), math.exp(600)),  # widened to float64
    torch.bfloat16: (1.0, math.exp(80)),
    torch.float16: (1.0, math.exp(80)),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """The classes `start` to `start + V` of `size`, and what is asked of them.

    Logits are scaled first: x becomes scale * x, and with a softcap cap * tanh(scale * x / cap).
    """

    start: int
    size: int
    options: Options

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
        loss, lse = (
            each if each is None or each.ndim == 0 else each.reshape(-1)[rows] for each in (self.loss, self.lse)
        )
        return Upstream(loss, lse, self.denominator)


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> Tensor:
    """What each row of this shard contributes to the loss: [N, 3 to 5], float32 (float64 for float64 logits).

    The columns are
    - lse_hi: the logsumexp over the non-target classes; -inf where there is none, or all their logits are -inf;
    - lse_lo: what rounding to float32 takes from it; NaN for a target that is no class;
    - target_logit: 0 if another shard holds it;
    - logit_sum, where label smoothing asks for it: of all logits, times the weights [size] of the classes where there are any;
    - rival, where the accuracy asks for it.
    A row to ignore gives -inf, 0, 0, 0, -inf.
    The target is left out of the logsumexp because the sum of the others is 1 - p, the loss and the gradient of a likely
    target. Beside exp(0) of such a target float32 would drop it.
    """
    V, classes = logits.shape[-1], target.reshape(-1).long()  # [N]
    out = torch.empty(len(classes), shard.options.columns, dtype=_narrow(logits.dtype), device=logits.device)
    if V == 0:
        return _without_ignored(out.copy_(_nothing(out, shard)), classes, shard)
    x = logits.reshape(-1, V)  # [N, V]
    for some, space in _chunks(x):
        exponentials = _exponentials(x[some], classes[some], weight, shard, space)
        out[some] = _without_ignored(exponentials.statistics, classes[some], shard)
    return out


@dataclass(frozen=True, slots=True)
class Exponentials:
    """Of some rows, in `_wide` numbers: exp(logit - base) [n, V], 0 for the target, and the statistics of the rows.

    base: [n, 1] in float64: 0, or the largest logit but the target's, -inf where there is none. None where it is 0 in every row,
    and all numbers are finite.
    index: [n, 1], of the target; is_here: whether this shard holds it, None where it holds all classes.
    statistics: [n, 3 or 4].
    """

    values: Tensor
    base: Tensor | None
    index: Tensor
    is_here: Tensor | None
    statistics: Tensor


def _exponentials(x: Tensor, classes: Tensor, weight: Tensor | None, shard: Shard, space: Tensor) -> Exponentials:
    """Of logits [n, V], in the memory of `space`."""
    V, local = x.shape[-1], (classes - shard.start if shard.start else classes).unsqueeze(1)  # [n, 1]
    index, is_here = local.clamp(0, V - 1), None if shard.size == V else (local >= 0) & (local < V)
    z = _count(space[: len(x)].copy_(x), shard)
    logit = z.gather(1, index)
    columns = [logit if is_here is None else logit.masked_fill(~is_here, 0)]
    if shard.sums:
        logits_summed = z if weight is None else z * shard.part(weight, V).to(z.dtype)
        columns.append(logits_summed.sum(-1, keepdim=True))
    hidden = torch.full_like(logit, -torch.inf) if is_here is None else logit.masked_fill(is_here, -torch.inf)
    z.scatter_(1, index, hidden)
    if shard.options.return_token_accuracy:
        columns.append(rival(z, local, _narrow(x.dtype)))
    total = _exp(z).sum(-1, keepdim=True).double()  # [n, 1]
    if _all_between(total, *SUMS[x.dtype]):
        base, lse = None, total.log()
        lse_hi = lse.to(_narrow(x.dtype))
        lse_lo = lse - lse_hi
    else:
        low, high = SUMS[x.dtype]
        z = _count(z.copy_(x), shard).scatter_(1, index, hidden)
        base = torch.where((total > low) & (total < high), 0, z.amax(-1, keepdim=True).double())
        total = _exp(z.sub_(_finite(base).to(z.dtype))).sum(-1, keepdim=True).double()
        log_total = total.log()
        lse_hi = (base + log_total).to(_narrow(x.dtype))
        lse_lo = ((base - lse_hi) + log_total).masked_fill_(total == 0, 0)
    return Exponentials(z, base, index, is_here, torch.cat([lse_hi, lse_lo, *columns], 1).to(lse_hi.dtype))


def _exp(z: Tensor) -> Tensor:
    """In the memory of z."""
    return z.mul_(LOG2_E).exp2_()


def _all_between(numbers: Tensor, low: float, high: float) -> bool:
    """Whether the host knows that all numbers are between these; it does not wait for them."""
    if not can_read(numbers) or numbers.numel() == 0:
        return False
    smallest, largest = (each.item() for each in numbers.aminmax())
    return low < smallest and largest < high  # a NaN is no less


def _nothing(like: Tensor, shard: Shard) -> Tensor:
    """The statistics of no class."""
    nothing = like.new_zeros(like.shape[-1])
    nothing[0].fill_(-torch.inf)
    if shard.options.return_token_accuracy:
        nothing[-1].fill_(-torch.inf)
    return nothing


def _without_ignored(statistics: Tensor, classes: Tensor, shard: Shard) -> Tensor:
    """The statistics, NaN for a target that is no class, and nothing for rows to ignore."""
    ignore_index = shard.options.ignore_index
    if not 0 <= ignore_index < shard.size and _all_between(classes, -1, shard.size):
        return statistics
    wrong = (classes < 0) | (classes >= shard.size)  # those to ignore mostly among them
    statistics[:, 1].masked_fill_(wrong, torch.nan)
    return torch.where((classes == ignore_index).unsqueeze(1), _nothing(statistics, shard), statistics)


def merge(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first three statistics [shards, N, 3] of all shards as one: base, log_sum and log_odds, each [N].

    log_sum is of exp(logit - base) over all classes, so the logsumexp is base + log_sum. They stay apart because
    their sum rounds at the size of the logits. base is 0 where every logit is -inf, and log_sum is -inf.
    log_odds is log((1 - p) / p) for the p of the true class: the loss is softplus(log_odds), and p - 1 is
    -sigmoid(log_odds), both accurate for p near 1. All in float64: it is little beside the logits.
    The result depends on nothing but the statistics, so ranks that gathered the same numbers get the same bits.
    """
    lse_hi, lse_lo, target_logits = statistics.double().unbind(-1)  # [shards, N] each
    if len(statistics) == 1:
        target_logit = target_logits[0]
        base = _finite(torch.maximum(lse_hi[0], target_logit))
        others = (lse_hi[0] - base) + lse_lo[0]
    else:
        target_logit = target_logits.sum(0)
        base = _finite(torch.maximum(lse_hi.amax(0), target_logit))
        others = ((lse_hi - base) + lse_lo).logsumexp(0)
    target_logit = target_logit - base  # an infinite logit gives NaN
    return base, torch.logaddexp(others, target_logit), others - target_logit


def losses(statistics: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> tuple[Tensor, Tensor]:
    """The loss and the logsumexp of each row, of the target's shape, from the statistics [shards, N, 3 or 4] of all shards.

    weight: [size]. Both are 0 at a row to ignore.
    """
    options = shard.options
    base, log_sum, log_odds = merge(statistics[..., :3])
    lse = base + log_sum
    classes = target.reshape(-1).long()
    loss = F.softplus(log_odds, threshold=100)  # above it log_odds itself
    if weight is not None:
        loss = loss * of_target(weight, classes, options.ignore_index, loss.dtype)
    if shard.sums:
        weight_sum = shard.size if weight is None else weight.to(loss.dtype).sum()
        # Each over the size before they are subtracted: both grow with it.
        uniform = (weight_sum * base - statistics[..., 3].sum(0)) / shard.size + (weight_sum / shard.size) * log_sum
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * uniform  # the loss of a uniform target
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    # Masked last: autograd forbids changing a view in place where it is an output.
    ignored = (classes == options.ignore_index).view(target.shape)
    loss, lse = (x.to(statistics.dtype).view(target.shape).masked_fill(ignored, 0) for x in (loss, lse))
    return loss, lse


def of_target(weight: Tensor | None, classes: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class, [N]; 0 at a token to ignore. A target that is no class has made the loss NaN."""
    if weight is None:
        return (classes != ignore_index).to(dtype)
    if len(weight) == 0:
        return torch.zeros(len(classes), dtype=dtype, device=classes.device)
    return weight[classes.long().clamp(0, len(weight) - 1)].to(dtype).masked_fill(classes == ignore_index, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The scalars of each row's gradient, [N] in float64: softmax_scale * softmax - smoothing * weight, target_grad at the target.

    base, log_sum: as `merge` gives them; the logsumexp is their sum. smoothing: None without label smoothing.
    """

    base: Tensor
    log_sum: Tensor
    softmax_scale: Tensor
    target_grad: Tensor
    smoothing: Tensor | None


def rows(statistics: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard) -> Rows:
    """From the statistics of all shards and the gradients that arrive."""
    options = shard.options
    base, log_sum, log_odds = merge(statistics[..., :3])
    classes = target.reshape(-1).long()
    ignored = classes == options.ignore_index
    if upstream.loss is None:
        grad = torch.zeros_like(log_sum)
    else:
        grad = upstream.loss.to(log_sum.dtype)
        grad = grad if upstream.denominator is None else grad / upstream.denominator
        grad = torch.where(ignored, 0, grad.reshape(-1))
    # nll_scale * (softmax - one-hot) + lse_scale * softmax - smoothing * weight, where softmax_scale = nll_scale + lse_scale.
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
        of_lse = 2 * options.z_loss * torch.where(ignored, 0, base + log_sum) * grad
        lse_scale = of_lse if lse_scale is None else lse_scale + of_lse
    if upstream.lse is not None:
        of_lse = torch.where(ignored, 0, upstream.lse.reshape(-1).to(grad.dtype))
        lse_scale = of_lse if lse_scale is None else lse_scale + of_lse
    nll_at_target = nll_scale * torch.sigmoid(log_odds)
    if lse_scale is not None:
        nll_at_target = nll_at_target - lse_scale * torch.sigmoid(-log_odds)
    target_grad = -nll_at_target if target_grad is None else target_grad - nll_at_target
    softmax_scale = nll_scale if lse_scale is None else nll_scale + lse_scale
    return Rows(base, log_sum, softmax_scale, torch.where(ignored, 0, target_grad), smoothing)


def gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    out: Tensor,
    guessed: Tensor | None = None,
) -> Tensor:
    """The gradient of this shard's logits, written to `out`, contiguous, which may be `logits`; returned.

    The gradient of what a logit counts as, see `Rows`, times the derivative of that. Rows whose softmax_scale,
    smoothing and target_grad are 0 are exactly 0.
    guessed: the upstream gradient of the loss for which `out` has been made.
    """
    if out.numel() == 0 or (guessed is not None and guess.was_right(guessed, upstream.loss)):
        return out
    classes, x = target.reshape(-1).long(), logits.reshape(-1, logits.shape[-1])
    dx = out.view(x.shape)  # [N, V] both
    for some, space in _chunks(x):
        exponentials = _exponentials(x[some], classes[some], weight, shard, space)
        _write(exponentials, x[some], classes[some], weight, statistics[:, some], upstream.of(some), shard, dx[some])
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard, out: Tensor
) -> Tensor:
    """The statistics [N, 3 or 4] of one shard of all classes, and its gradient, from the same exponentials, in `out`.

    upstream: of the loss alone, one number. Where it is NaN only the statistics are made.
    """
    nothing_guessed = can_read(logits) and upstream.loss is not None and bool(upstream.loss.isnan().all())
    if out.numel() == 0 or nothing_guessed:
        return statistics(logits, target, weight, shard)
    classes, x = target.reshape(-1).long(), logits.reshape(-1, logits.shape[-1])
    dx, parts = out.view(x.shape), []
    for some, space in _chunks(x):
        exponentials = _exponentials(x[some], classes[some], weight, shard, space)
        parts.append(_without_ignored(exponentials.statistics, classes[some], shard))
        _write(exponentials, x[some], classes[some], weight, parts[-1].unsqueeze(0), upstream.of(some), shard, dx[some])
    return torch.cat(parts)


def _write(
    of: Exponentials,
    x: Tensor,
    classes: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: Shard,
    dx: Tensor,
) -> None:
    """The gradient of some rows, from their exponentials, whose memory it takes."""
    row, each = rows(statistics, classes, weight, upstream, shard), of.values
    scale = row.softmax_scale * ((-row.base if of.base is None else of.base.squeeze(1) - row.base) - row.log_sum).exp_()
    slope = _slope(x, each.dtype, shard)  # before dx is written: it may be x
    each.mul_(scale.to(each.dtype).unsqueeze(1))
    if row.smoothing is not None:
        smoothing = row.smoothing.to(each.dtype).unsqueeze(1)
        each -= smoothing if weight is None else smoothing * shard.part(weight, x.shape[-1]).to(each.dtype)
    target_grad = row.target_grad.to(each.dtype).unsqueeze(1)
    each.scatter_(
        1,
        of.index,
        target_grad if of.is_here is None else torch.where(of.is_here, target_grad, each.gather(1, of.index)),
    )
    if slope is not None:
        each.mul_(slope)
    if of.base is not None or row.smoothing is not None:  # 0 times what need not be finite
        is_zero = (row.softmax_scale == 0) & (row.target_grad == 0)
        if row.smoothing is not None:
            is_zero &= row.smoothing == 0
        each.masked_fill_(is_zero.unsqueeze(1), 0)
    dx.copy_(each)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """Of what is returned beside the gradient."""
    return torch.promote_types(dtype, torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What the passes compute in, to round once: wider than the logits."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _count(z: Tensor, shard: Shard) -> Tensor:
    """What the logits z count as, in their memory."""
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if scale != 1:
        z.mul_(scale)
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


def _slope(x: Tensor, wide: torch.dtype, shard: Shard) -> Tensor | float | None:
    """The derivative of what the logits count as; None where it is 1."""
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if cap is None:
        return None if scale == 1 else scale
    e = (x.to(wide) * (scale / cap)).abs_().mul_(-2).exp_()
    return 4 * scale * e / (1 + e).square_()  # 1 - tanh**2, which as a difference would lose its digits


def _finite(largest: Tensor) -> Tensor:
    """What to subtract before exp: the largest logit, or 0 where it is -inf and the difference would be NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)


def _chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Equal chunks of the rows of x [N, V], and memory for one of them in `_wide` numbers, for all the same."""
    N, V = x.shape
    most = max(1, CHUNK * torch.get_num_threads() // V)
    step = -(-N // -(-N // most)) if N and not x.is_meta else max(1, N)  # what has no memory is taken at once
    space = torch.empty(min(step, N), V, dtype=_wide(x.dtype), device=x.device)
    return ((slice(start, start + step), space) for start in range(0, N, step))
