"""The passes over the logits in plain torch: the CPU path, and the meaning of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import can_read
from . import guess
from .accuracy import rival
from .merged import Merged, Shard, Upstream, finite, losses, merge, rows

__all__ = ["gradient", "losses", "statistics", "statistics_and_gradient"]

# Logits that each thread widens at a time: 4 MiB in float64, which stay in the L3. Smaller chunks cost more: the few ops on one number a
# row take the host some 0.1 ms a chunk, whatever its size.
CHUNK = 1 << 19
# By the dtype of the logits: bounds of a row's sum of exp(logit). Between them no max needs to be subtracted first. Nothing has
# overflowed, and what has underflowed is a smaller share of the sum than the gradient's dtype can tell.
SUMS = {
    torch.float64: (1.0, math.exp(600)),
    torch.float32: (math.exp(-600), math.exp(600)),  # widened to float64
    torch.bfloat16: (1.0, math.exp(80)),
    torch.float16: (1.0, math.exp(80)),
}


def statistics(logits: Tensor, target: Tensor, weight: Tensor | None, shard: Shard) -> Tensor:
    """What each row of this shard contributes to the loss: [N, 3 to 6], float32 (float64 for float64 logits).

    The columns are
    - lse_hi: the logsumexp over the non-target classes; -inf where there is none, or all their logits are -inf;
    - lse_lo: what rounding to float32 takes from it; NaN for a target that is no class;
    - target_logit: 0 if another shard holds it;
    - logit_sum and logit_sum_lo, where label smoothing asks for them: the sum of all logits, times the weights [size] of the classes
      where there are any, and what rounding to float32 takes from the sum. The loss subtracts this sum from V times the logsumexp;
      both grow with V and with the size of the logits;
    - rival, where the accuracy asks for it.
    An ignored row gives -inf, 0, 0, 0, 0, -inf.
    The logsumexp leaves the target out. The non-target classes have the share 1 - p of the softmax, and for a likely target the loss
    and the gradient are about that. In a float32 sum beside the target's own exponential it would be rounded away.
    """
    V, classes = logits.shape[-1], target.reshape(-1).long()  # [N]
    out = torch.empty(len(classes), shard.options.columns, dtype=_narrow(logits.dtype), device=logits.device)
    if V == 0:
        return _without_ignored(out.copy_(_nothing(out, shard)), classes, shard)
    parts = []
    for x, some, space in _chunks(logits, classes):
        exponentials = _exponentials(x, some, weight, shard, space)
        parts.append(_without_ignored(exponentials.statistics, some, shard))
    return _joined(parts) if parts else out


@dataclass(frozen=True, slots=True)
class Exponentials:
    """The exponentials of some rows, and their statistics.

    values: exp(logit - base) [n, V] in the dtype `_wide`, 0 at the target.
    base: [n, 1] in float64: 0, or the largest non-target logit, which is -inf where there is none. None where it is 0 in every row
    and every value is finite.
    index: [n, 1], the target's column. is_here: whether this shard holds the target; None where it holds all classes.
    statistics: [n, 3 to 6].
    """

    values: Tensor
    base: Tensor | None
    index: Tensor
    is_here: Tensor | None
    statistics: Tensor


def _exponentials(x: Tensor, classes: Tensor, weight: Tensor | None, shard: Shard, space: Tensor) -> Exponentials:
    """Those of logits x [n, V], computed in the memory of `space`."""
    V, local = x.shape[-1], (classes - shard.start if shard.start else classes).unsqueeze(1)  # [n, 1]
    is_here = None if shard.size == V else (local >= 0) & (local < V)
    index = local if shard.all_count and is_here is None else local.clamp(0, V - 1)
    z = _scaled((space if len(space) == len(x) else space[: len(x)]).copy_(x), shard)
    logit = z.gather(1, index)
    columns = [logit if is_here is None else logit.masked_fill(~is_here, 0)]
    if shard.sums:
        summed = z if weight is None else z.double() * shard.part(weight, V).double()
        total = summed.sum(-1, keepdim=True, dtype=torch.float64)
        columns += _split(total, _narrow(x.dtype))
    hidden = -torch.inf if is_here is None else logit.masked_fill(is_here, -torch.inf)
    z.scatter_(1, index, hidden)
    if shard.options.return_token_accuracy:
        columns.append(rival(z, local, _narrow(x.dtype)))
    total = z.exp_().sum(-1, keepdim=True).double()  # [n, 1]
    if _all_between(total, *SUMS[x.dtype]):
        base, lse = None, total.log()
        lse_hi = lse.to(_narrow(x.dtype))
        lse_lo = lse - lse_hi
    else:
        low, high = SUMS[x.dtype]
        z = _scaled(z.copy_(x), shard).scatter_(1, index, hidden)
        base = torch.where((total > low) & (total < high), 0, z.amax(-1, keepdim=True).double())
        total = z.sub_(finite(base).to(z.dtype)).exp_().sum(-1, keepdim=True).double()
        log_total = total.log()
        lse_hi = (base + log_total).to(_narrow(x.dtype))
        lse_lo = ((base - lse_hi) + log_total).masked_fill_(total == 0, 0)
    return Exponentials(z, base, index, is_here, torch.cat([lse_hi, lse_lo, *columns], 1).to(lse_hi.dtype))


def _split(numbers: Tensor, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each number rounded to `narrow`, and what the rounding takes from it: 0 where the number is infinite."""
    rounded = numbers.to(narrow)
    return rounded, torch.where(rounded == numbers, 0, numbers - rounded)


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
    """The statistics, with NaN for a target that is no class, and `_nothing` for an ignored row."""
    if shard.all_count:
        return statistics
    ignore_index = shard.options.ignore_index
    wrong = (classes < 0) | (classes >= shard.size)  # among them ignored rows, which are replaced below
    statistics[:, 1].masked_fill_(wrong, torch.nan)
    return torch.where((classes == ignore_index).unsqueeze(1), _nothing(statistics, shard), statistics)


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

    It is the gradient that `Rows` describes, of the logits after scale and softcap, times the derivative of scale and softcap. A row
    whose softmax_scale, smoothing and target_grad are 0 gets exactly 0.
    guessed: the upstream gradient for which `out` already holds the gradient.
    """
    if out.numel() == 0 or (guessed is not None and guess.was_right(guessed, upstream.loss)):
        return out
    start = 0
    for x, classes, space, dx in _chunks(logits, target.reshape(-1).long(), out):
        some = slice(start, start := start + len(x))
        exponentials = _exponentials(x, classes, weight, shard, space)
        _write(exponentials, x, classes, weight, merge(statistics[:, some]), upstream.of(some), shard, dx)
    return out


def statistics_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, upstream: Upstream, shard: Shard, out: Tensor
) -> tuple[Tensor, Merged | None]:
    """The statistics [N, 3 to 6] of one shard of all classes, and its gradient, from the same exponentials, in `out`.

    upstream: of the loss alone, one number. Where it is NaN only the statistics are computed.
    Returned beside the statistics: what `merge` gives for them, where all rows were one chunk.
    """
    nothing_guessed = can_read(logits) and upstream.loss is not None and math.isnan(upstream.loss.item())
    if out.numel() == 0 or nothing_guessed:
        return statistics(logits, target, weight, shard), None
    parts: list[Tensor] = []
    for x, classes, space, dx in _chunks(logits, target.reshape(-1).long(), out):
        exponentials = _exponentials(x, classes, weight, shard, space)
        parts.append(_without_ignored(exponentials.statistics, classes, shard))
        merged = merge(parts[-1].unsqueeze(0))
        _write(exponentials, x, classes, weight, merged, upstream, shard, dx)
    return _joined(parts), merged if len(parts) == 1 else None


def _write(
    exponentials: Exponentials,
    x: Tensor,
    classes: Tensor,
    weight: Tensor | None,
    merged: Merged,
    upstream: Upstream,
    shard: Shard,
    dx: Tensor,
) -> None:
    """Writes the gradient of some rows to dx. It is computed in the memory of their exponentials."""
    row, dlogits = rows(merged, classes, weight, upstream, shard), exponentials.values
    base, index, is_here, wide = exponentials.base, exponentials.index, exponentials.is_here, dlogits.dtype
    scale = row.softmax_scale * ((-row.base if base is None else base.squeeze(1) - row.base) - row.log_sum).exp_()
    slope = _slope(x, wide, shard)  # before dx is written: it may be x
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
    if base is not None or slope is not None or row.smoothing is not None:  # 0 times what is not finite is not 0
        is_zero = (row.softmax_scale == 0) & (row.target_grad == 0)
        if row.smoothing is not None:
            is_zero &= row.smoothing == 0
        dlogits.masked_fill_(is_zero.unsqueeze(1), 0)
    dx.copy_(dlogits)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses."""
    return torch.promote_types(dtype, torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the passes compute in: wider than the logits, so that a result is rounded once."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _scaled(z: Tensor, shard: Shard) -> Tensor:
    """The logits after scale and softcap, in the memory of z."""
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if scale != 1:
        z.mul_(scale)
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


def _slope(x: Tensor, wide: torch.dtype, shard: Shard) -> Tensor | float | None:
    """The derivative of scale and softcap; None where it is 1."""
    scale, cap = shard.options.logit_scale, shard.options.softcap
    if cap is None:
        return None if scale == 1 else scale
    e = (x.to(wide) * (scale / cap)).abs_().mul_(-2).exp_()
    return 4 * scale * e / (1 + e).square_()  # 1 - tanh**2, which as a difference would lose its digits


def _chunks(logits: Tensor, classes: Tensor, *outputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Equal chunks of the rows of logits [N, V]: their logits, their classes, memory to compute in, and their rows of each output.

    outputs: contiguous, of the logits' shape. The memory is of the dtype `_wide`, and the same for all chunks.
    """
    V = logits.shape[-1]
    x, *written = (each if each.ndim == 2 else each.reshape(-1, V) for each in (logits, *outputs))
    N = len(x)
    if N == 0:
        return
    most = max(1, CHUNK * torch.get_num_threads() // V)
    step = N if x.is_meta else -(-N // -(-N // most))  # what has no memory is taken at once
    space = torch.empty(step, V, dtype=_wide(x.dtype), device=x.device)
    for some, of_classes, *parts in zip(*(torch.split(each, step) for each in (x, classes, *written)), strict=True):
        yield some, of_classes, space, *parts


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
