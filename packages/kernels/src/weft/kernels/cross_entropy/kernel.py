"""The kernels of cross-entropy: three passes, of which `statistics` and `gradient` go over the logits.

`statistics` reads the logits: 2 bytes of memory traffic for a bf16 logit. `losses` combines the shards' three or five
numbers for each row. `gradient` reads the logits again and writes their gradient: 4 bytes.

If one shard has all classes, `statistics_and_gradient` does both passes over the logits in a single kernel, for a
known or guessed upstream gradient. After a guess, `gradient_unless_guessed` is the backward: it writes only if the
guess was wrong. The kernels know no torch and no ranks.

An optional argument (weight_ptr, cap, label_smoothing, z_loss, ...) is None if the call does not use it. Triton then
compiles the kernel without it.

Row `n` of the logits is row `n % T` of batch `n // T`, so a slice such as `logits[:, :-1]` is read in place.
Offsets are 64-bit: row * stride, and class * stride for transposed logits, both exceed 2**31.
Logits are scaled first: x becomes scale * x, or with a cap, cap * tanh(scale * x / cap).
RAGGED rows are contiguous but not 16-byte aligned. Their aligned 16-byte words are loaded and stored as words. The
columns before the first word and after the last, fewer than two words in all, are loaded and stored one by one.

lse_hi + lse_lo is the logsumexp over the non-target classes as two float32.
"""

import triton
import triton.language as tl

from .row import aligned, aligned_span, plus, row_offset, row_statistics, split, unaligned_cols, write


@triton.jit
def _store_statistics(
    statistics_ptr, row, lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo, SUM: tl.constexpr
):  # fmt: skip
    columns: tl.constexpr = 5 if SUM else 3
    tl.store(statistics_ptr + row * columns, lse_hi)
    tl.store(statistics_ptr + row * columns + 1, lse_lo)
    tl.store(statistics_ptr + row * columns + 2, target_logit)
    if SUM:
        tl.store(statistics_ptr + row * columns + 3, logit_sum)
        tl.store(statistics_ptr + row * columns + 4, logit_sum_lo)


# Arguments that differ between ranks or calls without changing the generated code are not specialized: a single
# compiled kernel takes all values.
@triton.jit(
    do_not_specialize=["T", "vocab_start", "vocab_size", "ignore_index", "scale", "cap"],
    do_not_specialize_on_alignment=["shard_weight_sum_ptr"],
)
def statistics(
    x_ptr, target_ptr, shard_weight_ptr, shard_weight_sum_ptr, statistics_ptr, rival_ptr,
    V, T, stride_xb, stride_xt, stride_xv,
    vocab_start, vocab_size, ignore_index, scale, cap,
    SUM: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """For each row: lse_hi, lse_lo, the target's logit, and with SUM the sum of all logits as two float32.

    The logsumexp leaves the target out. The target's logit is 0 if another shard has the target.
    shard_weight: the weights of this shard's classes; then the sum is over weight * logit. shard_weight_sum: their
        sum.
    rival: see `merged.find_rival`.
    An ignored row is not read, and gives -inf, 0, 0, 0, 0. A target outside the vocabulary makes lse_lo NaN, and so
    the loss, because a kernel cannot raise.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo, rival = row_statistics(
        x_ptr, row_offset(row, T, stride_xb, stride_xt), target, shard_weight_ptr, shard_weight_sum_ptr,
        V, stride_xv, vocab_start, vocab_size, ignore_index, scale, cap, SUM, rival_ptr is not None, RAGGED, BLOCK_V, 1,
    )  # fmt: skip
    _store_statistics(statistics_ptr, row, lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo, SUM)
    if rival_ptr is not None:
        tl.store(rival_ptr + row, rival)


@triton.jit
def _log1p(y):
    """log(1 + y) for y in 0 to 1, including the digits lost in 1 + y (Goldberg 1991, theorem 4)."""
    rounded = 1.0 + y
    return tl.where(rounded == 1.0, y, tl.log(rounded) * (y / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))


@triton.jit
def _merged(statistics_ptr, mask, R, stride_r, wide: tl.constexpr):
    """The results of `_odds` for rows, from the statistics of R shards: an online logsumexp in the type `wide`."""
    lse_hi = tl.load(statistics_ptr, mask=mask, other=0.0).to(wide)  # the running max over the shards
    lse_lo = tl.load(statistics_ptr + 1, mask=mask, other=0.0).to(wide)
    target_logit = tl.load(statistics_ptr + 2, mask=mask, other=0.0).to(wide)
    sum_exp = tl.exp(lse_lo)  # sum of exp(logit - lse_hi) over the non-target classes
    for _ in range(1, R):
        statistics_ptr += stride_r
        shard_hi = tl.load(statistics_ptr, mask=mask, other=0.0).to(wide)
        new_hi = tl.maximum(lse_hi, shard_hi)
        base = tl.where(new_hi == -float("inf"), 0.0, new_hi)
        shard_sum_exp = tl.exp(tl.load(statistics_ptr + 1, mask=mask, other=0.0).to(wide))
        sum_exp = sum_exp * tl.exp(lse_hi - base) + shard_sum_exp * tl.exp(shard_hi - base)
        target_logit += tl.load(statistics_ptr + 2, mask=mask, other=0.0).to(wide)
        lse_hi = new_hi
    return _odds(lse_hi, sum_exp, target_logit)


@triton.jit
def _weight_sum(weight_sum_ptr, vocab_size, wide: tl.constexpr):
    """The sum of the weights of all classes; without weights, the number of classes."""
    if weight_sum_ptr is not None:
        return tl.load(weight_sum_ptr).to(wide)
    else:
        return tl.cast(vocab_size, wide)


@triton.jit
def _logit_sum(statistics_ptr, mask):
    """The sum of a shard's logits, in float64."""
    high = tl.load(statistics_ptr + 3, mask=mask, other=0.0).to(tl.float64)
    return high + tl.load(statistics_ptr + 4, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def _odds(lse_hi, sum_exp, target_logit):
    """largest, log_sum and log_odds, as defined in `merged.merge`, where `largest` is called base."""
    largest = tl.maximum(lse_hi, target_logit)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    lse_hi -= largest
    target_logit -= largest  # one of the two is now 0
    log_sum = tl.log(sum_exp * tl.exp(lse_hi) + tl.exp(target_logit))
    return largest, log_sum, (lse_hi - target_logit) + tl.log(sum_exp)


@triton.jit(
    do_not_specialize=["N", "R", "vocab_size", "ignore_index", "label_smoothing", "z_loss"],
    do_not_specialize_on_alignment=["weight_ptr", "weight_sum_ptr"],  # scalar loads need no alignment
)
def losses(
    statistics_ptr, target_ptr, weight_ptr, weight_sum_ptr, loss_ptr, lse_ptr,
    N, R, vocab_size, ignore_index, label_smoothing, z_loss,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The loss and the logsumexp of each row, from the statistics [R, N, 3 or 5] of R shards. 0 for ignored rows.

    weight: of all classes. weight_sum: the sum of all weights.
    """
    SUM: tl.constexpr = label_smoothing is not None
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < N
    columns: tl.constexpr = 5 if SUM else 3
    statistics_ptr += rows * columns
    stride_r = N.to(tl.int64) * columns
    largest, log_sum, log_odds = _merged(statistics_ptr, is_row, R, stride_r, tl.float32)
    target = tl.load(target_ptr + rows, mask=is_row, other=ignore_index).to(tl.int64)
    ignored = target == ignore_index

    loss = tl.where(log_odds > 0.0, log_odds, 0.0) + _log1p(tl.exp(-tl.abs(log_odds)))
    if weight_ptr is not None:
        loss *= tl.load(weight_ptr + target, mask=is_row & (target >= 0) & (target < vocab_size), other=0.0)
    if SUM:
        weight_sum = _weight_sum(weight_sum_ptr, vocab_size, tl.float64)
        logit_sum = _logit_sum(statistics_ptr, is_row)
        for shard in range(1, R):
            logit_sum += _logit_sum(statistics_ptr + shard * stride_r, is_row)
        # In float64: a constant added to all logits makes both terms large, and leaves their difference unchanged.
        largest_less_mean = ((weight_sum * largest.to(tl.float64) - logit_sum) / vocab_size).to(tl.float32)
        loss = loss * (1.0 - label_smoothing) + label_smoothing * (
            largest_less_mean + (weight_sum / vocab_size).to(tl.float32) * log_sum
        )
    lse = largest + log_sum
    if z_loss is not None:
        loss += z_loss * lse * lse
    tl.store(loss_ptr + rows, tl.where(ignored, 0.0, loss), mask=is_row)
    tl.store(lse_ptr + rows, tl.where(ignored, 0.0, lse), mask=is_row)


@triton.jit
def _row_factors(
    target, weight_ptr, weight_sum_ptr, grad, grad_lse, largest, log_sum, log_odds,
    vocab_size, ignore_index, label_smoothing, z_loss,
    wide: tl.constexpr,
):  # fmt: skip
    """softmax_scale, target_grad and smoothing of a row, as in `merged.RowFactors`. All are 0 for an ignored row.

    grad: the upstream gradient of the row's loss, divided by the denominator. grad_lse: the upstream gradient of the
        lse.
    """
    ignored = target == ignore_index
    target_weight = 1.0
    if weight_ptr is not None:
        target_weight = tl.load(weight_ptr + target, mask=(target >= 0) & (target < vocab_size), other=0.0)
    grad = tl.where(ignored, 0.0, grad)
    nll_scale = grad * target_weight
    lse_scale = tl.where(ignored, 0.0, grad_lse)  # the gradient of the lse: multiplies the softmax alone
    smoothing = 0.0
    if label_smoothing is not None:
        smoothing = grad * label_smoothing / vocab_size
        nll_scale -= nll_scale * label_smoothing
        lse_scale += tl.where(ignored, 0.0, smoothing * _weight_sum(weight_sum_ptr, vocab_size, wide))
    if z_loss is not None:
        lse_scale += 2.0 * z_loss * tl.where(ignored, 0.0, largest + log_sum) * grad
    target_grad = (
        lse_scale / (1.0 + tl.exp(log_odds)) - nll_scale / (1.0 + tl.exp(-log_odds)) - smoothing * target_weight
    )
    return nll_scale + lse_scale, tl.where(ignored, 0.0, target_grad), smoothing


@triton.jit
def _write_row(
    x_ptr, offset, target, shard_weight_ptr, dx_ptr, dx_offset, largest, log_sum, softmax_scale, target_grad, smoothing,
    V, stride_xv, vocab_start, scale, cap,
    SUM: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store a row's gradient, given the factors from `_row_factors`.

    If all factors are 0 the row is not read: the gradient is exactly 0 for any logits.
    """
    is_zero = (softmax_scale == 0.0) & (target_grad == 0.0) & (smoothing == 0.0)
    base, base_lo, softmax_scale_lo, smoothing_lo = largest, log_sum, 0.0, 0.0
    if x_ptr.dtype.element_ty == tl.float32:
        base, base_lo = plus(largest.to(tl.float32), log_sum)
        softmax_scale, softmax_scale_lo = split(softmax_scale)
        target_grad = target_grad.to(tl.float32)
        if SUM:
            smoothing, smoothing_lo = split(smoothing)
    first, count = aligned_span(x_ptr, offset, V, RAGGED)
    x_aligned_ptr = aligned(x_ptr, offset, first, RAGGED)
    dx_aligned_ptr = aligned(dx_ptr, dx_offset, first, RAGGED)
    lanes = tl.arange(0, BLOCK_V)

    if is_zero:
        for start in range(0, count, BLOCK_V):
            at = start + lanes
            tl.store(dx_aligned_ptr + at, tl.zeros([BLOCK_V], dx_ptr.dtype.element_ty), mask=at < count)
        if RAGGED:
            cols, in_row = unaligned_cols(x_ptr, first, count, V)
            tl.store(dx_ptr + dx_offset + cols, cols.to(dx_ptr.dtype.element_ty) * 0, mask=in_row)
    else:
        local = target - vocab_start
        target_col = tl.where((local >= 0) & (local < V), local, -1).to(tl.int32)
        for start in range(0, count, BLOCK_V):
            at = start + lanes
            write(
                x_aligned_ptr + at.to(tl.int64) * stride_xv, dx_aligned_ptr + at, first + at, at < count,
                target_col, shard_weight_ptr,
                base, base_lo, softmax_scale, softmax_scale_lo, smoothing, smoothing_lo, target_grad, scale, cap,
                SUM,
            )  # fmt: skip
        if RAGGED:
            cols, in_row = unaligned_cols(x_ptr, first, count, V)
            write(
                x_ptr + offset + cols, dx_ptr + dx_offset + cols, cols, in_row,
                target_col, shard_weight_ptr,
                base, base_lo, softmax_scale, softmax_scale_lo, smoothing, smoothing_lo, target_grad, scale, cap,
                SUM,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "T", "stride_gn", "stride_ln", "R", "stride_r", "vocab_start", "vocab_size", "ignore_index",
        "scale", "cap", "label_smoothing", "z_loss",
    ],
    do_not_specialize_on_alignment=[
        "weight_ptr", "weight_sum_ptr", "statistics_ptr", "grad_ptr", "grad_lse_ptr", "denominator_ptr",
    ],
)  # fmt: skip
def gradient(
    x_ptr, target_ptr, shard_weight_ptr, weight_ptr, weight_sum_ptr, statistics_ptr, grad_ptr, grad_lse_ptr,
    denominator_ptr, dx_ptr,
    V, T, stride_xb, stride_xt, stride_xv, stride_gn, stride_ln, stride_dn, R, stride_r,
    vocab_start, vocab_size, ignore_index, scale, cap, label_smoothing, z_loss,
    RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of each row's logits: softmax_scale * softmax, target_grad at the target. See `merged.RowFactors`.

    Label smoothing subtracts smoothing * weight for each class. The result is multiplied by the derivative of scale
    and cap.

    shard_weight: the weights of this shard's classes. weight: of all classes. weight_sum: the sum of all weights.
    grad, grad_lse: the upstream gradients of each row's loss and lse, with strides. denominator: a scalar to divide
        grad by.
    The rows of dx are contiguous, and may be the rows of x. Without scale and cap, the gradient of float32 logits is
    within a unit in the last place.
    """
    # the type of a row's scalars
    wide: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float32 else tl.float32
    columns: tl.constexpr = 5 if label_smoothing is not None else 3
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    largest, log_sum, log_odds = _merged(statistics_ptr + row * columns, True, R, stride_r, wide)
    grad, grad_lse = 0.0, 0.0
    if grad_ptr is not None:
        grad = tl.load(grad_ptr + row * stride_gn).to(wide)
        if denominator_ptr is not None:
            grad /= tl.load(denominator_ptr)
    if grad_lse_ptr is not None:
        grad_lse = tl.load(grad_lse_ptr + row * stride_ln).to(wide)
    softmax_scale, target_grad, smoothing = _row_factors(
        target, weight_ptr, weight_sum_ptr, grad, grad_lse, largest, log_sum, log_odds,
        vocab_size, ignore_index, label_smoothing, z_loss, wide,
    )  # fmt: skip
    _write_row(
        x_ptr, row_offset(row, T, stride_xb, stride_xt), target, shard_weight_ptr, dx_ptr, row * stride_dn,
        largest, log_sum, softmax_scale, target_grad, smoothing,
        V, stride_xv, vocab_start, scale, cap, label_smoothing is not None, RAGGED, BLOCK_V,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["N", "T", "ignore_index", "scale", "cap", "label_smoothing", "z_loss"],
    do_not_specialize_on_alignment=[
        "weight_sum_ptr", "statistics_ptr", "grad_ptr", "denominator_ptr", "guess_ptr", "history_ptr",
    ],
)  # fmt: skip
def gradient_unless_guessed(
    x_ptr, target_ptr, weight_ptr, weight_sum_ptr, statistics_ptr, grad_ptr, denominator_ptr, guess_ptr,
    history_ptr, dx_ptr,
    N, V, T, stride_xb, stride_xt, stride_xv, stride_dn,
    ignore_index, scale, cap, label_smoothing, z_loss,
    RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`gradient` for one shard with all classes and a scalar upstream gradient, after a guess.

    dx already holds the gradient for the guess. It is recomputed only if grad differs from the guess.
    history: [2], the next guess and the last grad. Both are set to grad; but if grad differs from the last grad, the
        next guess is set to NaN, for none.
    """
    wide: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float32 else tl.float32
    columns: tl.constexpr = 5 if label_smoothing is not None else 3
    loss_grad = tl.load(grad_ptr)
    if tl.program_id(0) == 0:
        tl.store(history_ptr, tl.where(loss_grad == tl.load(history_ptr + 1), loss_grad, float("nan")))
        tl.store(history_ptr + 1, loss_grad)
    rows_to_write = tl.where(loss_grad == tl.load(guess_ptr), 0, N)
    grad = loss_grad.to(wide)
    if denominator_ptr is not None:
        grad /= tl.load(denominator_ptr)
    row = tl.program_id(0).to(tl.int64)
    while row < rows_to_write:
        target = tl.load(target_ptr + row).to(tl.int64)
        largest, log_sum, log_odds = _merged(statistics_ptr + row * columns, True, 1, 0, wide)
        softmax_scale, target_grad, smoothing = _row_factors(
            target, weight_ptr, weight_sum_ptr, grad, 0.0, largest, log_sum, log_odds,
            V, ignore_index, label_smoothing, z_loss, wide,
        )  # fmt: skip
        _write_row(
            x_ptr, row_offset(row, T, stride_xb, stride_xt), target, weight_ptr, dx_ptr, row * stride_dn,
            largest, log_sum, softmax_scale, target_grad, smoothing,
            V, stride_xv, 0, scale, cap, label_smoothing is not None, RAGGED, BLOCK_V,
        )  # fmt: skip
        row += tl.num_programs(0)


@triton.jit(
    do_not_specialize=["N", "T", "ignore_index", "scale", "cap", "label_smoothing", "z_loss"],
    do_not_specialize_on_alignment=["weight_sum_ptr", "grad_ptr", "denominator_ptr", "statistics_ptr"],
)
def statistics_and_gradient(
    x_ptr, target_ptr, weight_ptr, weight_sum_ptr, grad_ptr, denominator_ptr, statistics_ptr, rival_ptr, dx_ptr,
    N, V, T, stride_xb, stride_xt, stride_xv, stride_dn,
    ignore_index, scale, cap, label_smoothing, z_loss,
    RAGGED: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`statistics` and `gradient` in one kernel, for one shard with all classes and a scalar upstream gradient.

    Few programs run at once, so a row is still in the L2 cache when read again: 4 bytes of device memory traffic for
    a bf16 logit. The first pass loads STAGES - 1 blocks ahead. A grad of NaN means there is no guess: only the
    statistics are computed.
    """
    wide: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float32 else tl.float32
    SUM: tl.constexpr = label_smoothing is not None
    grad = tl.load(grad_ptr).to(wide)
    has_grad = grad == grad
    if denominator_ptr is not None:
        grad /= tl.load(denominator_ptr)
    row = tl.program_id(0).to(tl.int64)
    while row < N:
        offset = row_offset(row, T, stride_xb, stride_xt)
        target = tl.load(target_ptr + row).to(tl.int64)
        lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo, rival = row_statistics(
            x_ptr, offset, target, weight_ptr, weight_sum_ptr,
            V, stride_xv, 0, V, ignore_index, scale, cap, SUM, rival_ptr is not None, RAGGED, BLOCK_V, STAGES,
        )  # fmt: skip
        _store_statistics(statistics_ptr, row, lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo, SUM)
        if rival_ptr is not None:
            tl.store(rival_ptr + row, rival)
        if has_grad:
            largest, log_sum, log_odds = _odds(lse_hi.to(wide), tl.exp(lse_lo.to(wide)), target_logit.to(wide))
            softmax_scale, target_grad, smoothing = _row_factors(
                target, weight_ptr, weight_sum_ptr, grad, 0.0, largest, log_sum, log_odds,
                V, ignore_index, label_smoothing, z_loss, wide,
            )  # fmt: skip
            _write_row(
                x_ptr, offset, target, weight_ptr, dx_ptr, row * stride_dn,
                largest, log_sum, softmax_scale, target_grad, smoothing,
                V, stride_xv, 0, scale, cap, SUM, RAGGED, BLOCK_V,
            )  # fmt: skip
        row += tl.num_programs(0)
