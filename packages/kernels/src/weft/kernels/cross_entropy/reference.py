"""The passes over the logits in plain torch: the CPU path, and the reference for the kernels.

The op calls the functions in `__all__` through `function.select_passes`, which returns this module or `launch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch.backend import can_read, is_shape_alone
from . import guess
from .merged import (
    LossShard,
    MergedStatistics,
    Upstream,
    find_rival,
    gradient_factors,
    losses,
    merge,
    replace_minus_infinity,
)

__all__ = ["gradient", "losses", "statistics", "statistics_and_gradient"]

# Logits widened at a time, for each thread: 4 MiB in float64, which stay in the L3 cache. Smaller chunks cost more:
# the few ops on one number a row take the host about 0.1 ms a chunk, whatever its size.
CHUNK = 1 << 19
# By dtype of the logits: bounds of a row's sum of exp(logit). Between them no max need be subtracted first. Nothing
# has overflowed, and any underflow is a smaller share of the sum than the gradient's dtype can resolve.
SUMS = {
    torch.float64: (1.0, math.exp(600)),
    torch.float32: (math.exp(-600), math.exp(600)),  # widened to float64
    torch.bfloat16: (1.0, math.exp(80)),
    torch.float16: (1.0, math.exp(80)),
}


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: LossShard) -> Tensor:
    """Each row's statistics on this shard: [N, 3 to 6], float32 (float64 for float64 logits). The columns are

    - lse_hi: the logsumexp over the non-target classes; -inf if there are none or all their logits are -inf;
    - lse_lo: the rounding error of lse_hi; NaN for a target outside the vocabulary;
    - target_logit: 0 if another shard has the target;
    - logit_sum and logit_sum_lo, for label smoothing: the sum of all logits, each multiplied by the class's weight if
    there are weights, and the sum's rounding error. The loss subtracts this sum from the logsumexp times V, or times
    the sum of the weights; both grow with V and with the logits;
    - rival, for the accuracy: see `merged.find_rival`.

    In an ignored row, lse_hi and rival are -inf and the other columns are 0.

    The logsumexp leaves the target out. The non-target classes have the share 1 - p of the softmax, and for a likely
    target the loss and the gradient are about 1 - p. In a float32 sum with the target's exponential, 1 - p would be
    rounded away.
    """
    classes = target.reshape(-1).long()  # [N]
    if logits.numel() == 0:
        out = torch.empty(len(classes), shard.options.columns, dtype=_narrow(logits.dtype), device=logits.device)
        return _neutralize_ignored(out.copy_(_neutral_statistics(out, shard)), classes, shard)
    parts = []
    for _, x, chunk_classes, workspace, _ in _chunks(logits, classes, logits):
        exponentials = _exponentials(x, chunk_classes, weight, shard, workspace)
        parts.append(_neutralize_ignored(exponentials.statistics, chunk_classes, shard))
    return _join(parts)


@dataclass(frozen=True, slots=True)
class _Exponentials:
    """The exponentials of some rows' logits, and the rows' statistics. Made by `_exponentials`."""

    values: Tensor  # [n, V] in the dtype `_wide`: exp(logit - base), 0 at the target
    # [n, 1] in float64: 0 in rows whose sum of exp(logit) is within SUMS, otherwise the row's largest non-target logit,
    # or -inf without such a logit. None: the host knows that 0 is the base of all rows, and that every value is finite.
    base: Tensor | None
    index: Tensor  # [n, 1]: the target's column
    is_here: Tensor | None  # [n, 1]: whether this shard has the target; None if the shard has all classes
    statistics: Tensor  # [n, 3 to 6]


def _exponentials(
    x: Tensor, classes: Tensor, weight: Tensor | None, shard: LossShard, workspace: Tensor
) -> _Exponentials:
    """The exponentials of logits x [n, V], computed in the memory of `workspace` [n, V]."""
    V, narrow = x.shape[-1], _narrow(x.dtype)
    local = (classes - shard.start if shard.start else classes).unsqueeze(1)  # [n, 1]
    is_here = None if shard.vocab_size == V else (local >= 0) & (local < V)
    index = local if shard.none_ignored and is_here is None else local.clamp(0, V - 1)
    z = _scale_and_cap(workspace.copy_(x), shard)
    logit = z.gather(1, index)
    columns = [(logit if is_here is None else logit.masked_fill(~is_here, 0)).to(narrow)]
    if shard.options.label_smoothing:
        weighted = z if weight is None else z.double() * shard.part(weight, V).double()
        total = weighted.sum(-1, keepdim=True, dtype=torch.float64)
        columns += _split(total, narrow)
    hidden = -torch.inf if is_here is None else logit.masked_fill(is_here, -torch.inf)
    z.scatter_(1, index, hidden)
    if shard.options.return_token_accuracy:
        columns.append(find_rival(z, local, narrow))
    total = z.exp_().sum(-1, keepdim=True).double()  # [n, 1]
    if _all_between(total, *SUMS[x.dtype]):
        base, lse = None, total.log()
        lse_hi = lse.to(narrow)
        lse_lo = (lse - lse_hi).to(narrow)
    else:
        low, high = SUMS[x.dtype]
        z = _scale_and_cap(z.copy_(x), shard).scatter_(1, index, hidden)
        base = torch.where((total > low) & (total < high), 0, z.amax(-1, keepdim=True).double())
        total = z.sub_(replace_minus_infinity(base).to(z.dtype)).exp_().sum(-1, keepdim=True).double()
        log_total = total.log()
        lse_hi = (base + log_total).to(narrow)
        lse_lo = ((base - lse_hi) + log_total).masked_fill_(total == 0, 0).to(narrow)
    return _Exponentials(z, base, index, is_here, torch.cat([lse_hi, lse_lo, *columns], 1))


def _split(numbers: Tensor, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each number rounded to `narrow`, and the rounding error, 0 for an infinite number."""
    rounded = numbers.to(narrow)
    return rounded, torch.where(rounded == numbers, 0, numbers - rounded).to(narrow)


def _all_between(numbers: Tensor, low: float, high: float) -> bool:
    """Whether all numbers are known to be between low and high, without waiting for a device."""
    if not can_read(numbers) or numbers.numel() == 0:
        return False
    smallest, largest = numbers.aminmax()
    return low < smallest.item() and largest.item() < high  # false for NaN


def _neutral_statistics(like: Tensor, shard: LossShard) -> Tensor:
    """The statistics of an ignored row, or of a shard without classes."""
    neutral = like.new_zeros(like.shape[-1])
    neutral[0].fill_(-torch.inf)
    if shard.options.return_token_accuracy:
        neutral[-1].fill_(-torch.inf)
    return neutral


def _neutralize_ignored(statistics: Tensor, classes: Tensor, shard: LossShard) -> Tensor:
    """Replace ignored rows by `_neutral_statistics`, and set lse_lo to NaN for targets outside the vocabulary."""
    if shard.none_ignored:
        return statistics
    ignore_index = shard.options.ignore_index
    wrong = (classes < 0) | (classes >= shard.vocab_size)  # includes ignored rows, replaced below
    statistics[:, 1].masked_fill_(wrong, torch.nan)
    return torch.where((classes == ignore_index).unsqueeze(1), _neutral_statistics(statistics, shard), statistics)


def gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    upstream: Upstream,
    shard: LossShard,
    out: Tensor,
    guessed: Tensor | None = None,
) -> Tensor:
    """Write the gradient of this shard's logits to `out` and return `out`.

    `merged.RowFactors` gives each row's gradient of scaled and capped logits. That gradient times the derivative of
    scale and softcap is the result. A row whose softmax_scale, smoothing and target_grad are 0 gets exactly 0.

    statistics: of all shards, [shards, N, 3 to 6].
    out: contiguous; may be `logits`.
    guessed: the upstream gradient guessed in forward, for which `out` already holds the gradient: a right guess
        leaves nothing to do. None if `out` holds nothing.
    """
    if out.numel() == 0 or (guessed is not None and guess.was_right(guessed, upstream.loss)):
        return out
    for chunk, x, classes, workspace, dx in _chunks(logits, target.reshape(-1).long(), out):
        exponentials = _exponentials(x, classes, weight, shard, workspace)
        _write(exponentials, x, classes, weight, merge(statistics[:, chunk]), upstream.of(chunk), shard, dx)
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: LossShard, out: Tensor
) -> tuple[Tensor, MergedStatistics | None]:
    """Return the statistics [N, 3 to 6] of one shard with all classes, and write the gradient to `out`.

    Called in forward, to compute both from the same exponentials.
    upstream: the guess of the loss's upstream gradient, a scalar (`guess.py`). NaN stands for no guess: then only the
        statistics are computed.
    Also returns the merged statistics if all rows were a single chunk, else None.
    """
    has_no_guess = can_read(logits) and upstream.loss is not None and math.isnan(upstream.loss.item())
    if out.numel() == 0 or has_no_guess:
        return statistics(logits, target, weight, shard), None
    parts: list[Tensor] = []
    for _, x, classes, workspace, dx in _chunks(logits, target.reshape(-1).long(), out):
        exponentials = _exponentials(x, classes, weight, shard, workspace)
        parts.append(_neutralize_ignored(exponentials.statistics, classes, shard))
        merged = merge(parts[-1].unsqueeze(0))
        _write(exponentials, x, classes, weight, merged, upstream, shard, dx)
    return _join(parts), merged if len(parts) == 1 else None


def _write(
    exponentials: _Exponentials,
    x: Tensor,
    classes: Tensor,
    weight: Tensor | None,
    merged: MergedStatistics,
    upstream: Upstream,
    shard: LossShard,
    dx: Tensor,
) -> None:
    """Write the gradient of some rows to dx, computed in the memory of their exponentials."""
    row, dlogits = gradient_factors(merged, classes, weight, upstream, shard), exponentials.values
    base, index, is_here, wide = exponentials.base, exponentials.index, exponentials.is_here, dlogits.dtype
    scale = row.softmax_scale * ((-row.base if base is None else base.squeeze(1) - row.base) - row.log_sum).exp_()
    slope = _slope(x, wide, shard)  # computed before dx is written, which may be x
    dlogits.mul_(scale.to(wide).unsqueeze(1))
    if row.smoothing is not None:
        smoothing = row.smoothing.to(wide).unsqueeze(1)
        dlogits -= smoothing if weight is None else smoothing * shard.part(weight, x.shape[-1]).to(wide)
    target_grad = row.target_grad.to(wide).unsqueeze(1)
    if is_here is not None:
        target_grad = torch.where(is_here, target_grad, dlogits.gather(1, index))
    dlogits.scatter_(1, index, target_grad)
    if slope is not None:
        dlogits.mul_(slope)
    if base is not None or slope is not None or row.smoothing is not None:  # 0 * inf is not 0
        is_zero = (row.softmax_scale == 0) & (row.target_grad == 0)
        if row.smoothing is not None:
            is_zero &= row.smoothing == 0
        dlogits.masked_fill_(is_zero.unsqueeze(1), 0)
    dx.copy_(dlogits)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses."""
    return torch.promote_types(dtype, torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation: wider than the logits, so a result is rounded once."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _scale_and_cap(z: Tensor, shard: LossShard) -> Tensor:
    """Scale and cap the logits z in place."""
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if scale != 1:
        z.mul_(scale)
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


def _slope(x: Tensor, wide: torch.dtype, shard: LossShard) -> Tensor | float | None:
    """The derivative of scale and softcap; None if it is 1."""
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if cap is None:
        return None if scale == 1 else scale
    e = (x.to(wide) * (scale / cap)).abs_().mul_(-2).exp_()
    return 4 * scale * e / (1 + e).square_()  # 1 - tanh**2, without the cancellation of the difference


def _chunks(logits: Tensor, classes: Tensor, out: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Iterate over the rows of logits [N, V] in chunks of equal size.

    Yields a chunk's rows as a slice, its logits and classes, a workspace of dtype `_wide` shared by all chunks, and the
    chunk's rows of `out`: a contiguous tensor in the logits' shape, or the logits.
    """
    N, V = classes.shape[0], logits.shape[-1]
    if N == 0:
        return
    most = max(1, CHUNK * torch.get_num_threads() // V)
    step = N if is_shape_alone(logits) else -(-N // -(-N // most))
    workspace = torch.empty(step, V, dtype=_wide(logits.dtype), device=logits.device)
    x = logits.reshape(N, V)
    dx = x if out is logits else out.reshape(N, V)
    for start in range(0, N, step):
        chunk = slice(start, min(start + step, N))
        yield chunk, x[chunk], classes[chunk], workspace[: chunk.stop - start], dx[chunk]


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
