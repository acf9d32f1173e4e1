"""The passes over the logits, `statistics` (2 bytes a bf16 logit) and `gradient` (4), and `losses` between them.

Where there is one shard and the upstream gradient is known or guessed, `gradient` makes the statistics itself: FUSED.

They know no torch, no ranks.

Row `n` of the logits is row `n % T` of batch `n // T`, so a slice such as `logits[:, :-1]` is read where it lies.
Offsets are 64-bit: rows times stride, and classes times the stride of transposed logits, both pass 2**31.
A logit x counts as scale * x, or where there is a CAP as cap * tanh(scale * x / cap).
RAGGED rows are contiguous and begin anywhere: what lies in whole 16-byte words is read and written by words, the rest, fewer
than two words of a row, apart from it.
"""

import triton
import triton.language as tl

from .row import aligned, edges, in_heads, plus, row_offset, row_statistics, words, write


@triton.jit
def _keep(statistics_ptr, row, others, others_low, target_logit, plain, SUM: tl.constexpr):
    columns: tl.constexpr = 4 if SUM else 3
    tl.store(statistics_ptr + row * columns, others)
    tl.store(statistics_ptr + row * columns + 1, others_low)
    tl.store(statistics_ptr + row * columns + 2, target_logit)
    if SUM:
        tl.store(statistics_ptr + row * columns + 3, plain)


# What differs between ranks or calls without mattering to the generated code is not compiled in.
@triton.jit(do_not_specialize=["T", "vocab_start", "vocab_size", "ignore_index", "scale", "cap"])
def statistics(
    x_ptr, target_ptr, part_ptr, statistics_ptr,
    V, T, stride_xb, stride_xt, stride_xv,
    vocab_start, vocab_size, ignore_index, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row: logsumexp without the target, as a number and what it rounds away; the target's logit; and with SUM the sum of
    all logits, each times its class's weight where they are WEIGHTED: part, of this shard's classes.

    The third is 0 where this shard does not hold the target. An ignored row is not read: -inf, 0, 0, 0.
    A target that is no class makes the second NaN, and so the loss: a kernel cannot raise.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    others, others_low, target_logit, plain = row_statistics(
        x_ptr, row_offset(row, T, stride_xb, stride_xt), target, part_ptr,
        V, stride_xv, vocab_start, vocab_size, ignore_index, scale, cap, SUM, WEIGHTED, CAP, RAGGED, BLOCK_V, 1,
    )  # fmt: skip
    _keep(statistics_ptr, row, others, others_low, target_logit, plain, SUM)


@triton.jit
def _log1p(y):
    """log(1 + y) for y in 0 to 1, with the digits that 1 + y rounds away (Goldberg 1991, theorem 4)."""
    rounded = 1.0 + y
    return tl.where(rounded == 1.0, y, tl.log(rounded) * (y / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))


@triton.jit
def _merged(statistics_ptr, mask, R, stride_r, wide: tl.constexpr):
    """`_odds` of rows from the statistics of R shards, computed in the type `wide`."""
    others = tl.load(statistics_ptr, mask=mask, other=0.0).to(wide)
    total = tl.exp(tl.load(statistics_ptr + 1, mask=mask, other=0.0).to(wide))  # of exp(logit - others)
    target_logit = tl.load(statistics_ptr + 2, mask=mask, other=0.0).to(wide)
    for _ in range(1, R):
        statistics_ptr += stride_r
        there = tl.load(statistics_ptr, mask=mask, other=0.0).to(wide)
        both = tl.maximum(others, there)
        base = tl.where(both == -float("inf"), 0.0, both)
        there_total = tl.exp(tl.load(statistics_ptr + 1, mask=mask, other=0.0).to(wide))
        total = total * tl.exp(others - base) + there_total * tl.exp(there - base)
        target_logit += tl.load(statistics_ptr + 2, mask=mask, other=0.0).to(wide)
        others = both
    return _odds(others, total, target_logit)


@triton.jit
def _odds(others, total, target_logit):
    """largest, log_sum and log_odds; see `reference.merge`."""
    largest = tl.maximum(others, target_logit)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    others -= largest
    target_logit -= largest  # one of the two is 0 now
    log_sum = tl.log(total * tl.exp(others) + tl.exp(target_logit))
    return largest, log_sum, (others - target_logit) + tl.log(total)


@triton.jit(
    do_not_specialize=["N", "R", "vocab_size", "ignore_index", "label_smoothing", "z_loss"],
    do_not_specialize_on_alignment=["weight_ptr", "whole_ptr"],  # read a number at a time
)
def losses(
    statistics_ptr, target_ptr, weight_ptr, whole_ptr, loss_ptr, lse_ptr,
    N, R, vocab_size, ignore_index, label_smoothing, z_loss,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The loss and the logsumexp of each row, from the statistics [R, N, 3 or 4] of R shards; both 0 at a row to ignore.

    weight: of all classes.  whole: their sum.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < N
    columns: tl.constexpr = 4 if SUM else 3
    statistics_ptr += rows * columns
    stride_r = N.to(tl.int64) * columns
    largest, log_sum, log_odds = _merged(statistics_ptr, is_row, R, stride_r, tl.float32)
    target = tl.load(target_ptr + rows, mask=is_row, other=ignore_index).to(tl.int64)
    ignored = target == ignore_index

    loss = (tl.where(log_odds > 0.0, log_odds, 0.0) + _log1p(tl.exp(-tl.abs(log_odds)))) * (1.0 - label_smoothing)
    if WEIGHTED:
        loss *= tl.load(weight_ptr + target, mask=is_row & (target >= 0) & (target < vocab_size), other=0.0)
    if SUM:
        whole = tl.load(whole_ptr).to(tl.float32) if WEIGHTED else vocab_size.to(tl.float32)
        plain = tl.load(statistics_ptr + 3, mask=is_row, other=0.0)
        for shard in range(1, R):
            plain += tl.load(statistics_ptr + shard * stride_r + 3, mask=is_row, other=0.0)
        # Each over vocab_size before they are subtracted: both grow with it.
        loss += label_smoothing * ((whole * largest - plain) / vocab_size + (whole / vocab_size) * log_sum)
    lse = largest + log_sum
    loss += z_loss * lse * lse
    tl.store(loss_ptr + rows, tl.where(ignored, 0.0, loss), mask=is_row)
    tl.store(lse_ptr + rows, tl.where(ignored, 0.0, lse), mask=is_row)


@triton.jit
def _rows_to_make(N, grad_ptr, guess_ptr, arrived_ptr):
    """N, or 0 where the grad is the one that was guessed; and the next guess: this grad, if it arrived the last time too."""
    grad = tl.load(grad_ptr)
    if tl.program_id(0) == 0:
        tl.store(arrived_ptr, tl.where(grad == tl.load(arrived_ptr + 1), grad, float("nan")))
        tl.store(arrived_ptr + 1, grad)
    return tl.where(grad == tl.load(guess_ptr), 0, N)


@triton.jit(
    do_not_specialize=[
        "N", "T", "stride_gn", "stride_ln", "R", "stride_r", "vocab_start", "vocab_size", "ignore_index",
        "scale", "cap", "label_smoothing", "z_loss",
    ],
    do_not_specialize_on_alignment=[
        "weight_ptr", "whole_ptr", "statistics_ptr", "grad_ptr", "grad_lse_ptr", "denominator_ptr", "guess_ptr", "arrived_ptr",
    ],
)  # fmt: skip
def gradient(
    x_ptr, target_ptr, part_ptr, weight_ptr, whole_ptr, statistics_ptr, grad_ptr, grad_lse_ptr, denominator_ptr,
    guess_ptr, arrived_ptr, dx_ptr,
    N, V, T, stride_xb, stride_xt, stride_xv, stride_dn, stride_gn, stride_ln, R, stride_r,
    vocab_start, vocab_size, ignore_index, scale, cap, label_smoothing, z_loss,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, Z_LOSS: tl.constexpr,
    GRAD: tl.constexpr, GRAD_LSE: tl.constexpr, DENOMINATOR: tl.constexpr, FUSED: tl.constexpr, MADE: tl.constexpr,
    RAGGED: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of each row: factor * softmax, less spread times each class's weight with SUM, and `true` in the true
    class's place; times the derivative of what a logit counts as. See `reference.rows`.

    part, weight: the weights of this shard's classes, and of all classes; whole: their sum.  grad, grad_lse: of the loss and
    of the lse of this row; grad over the denominator where there is one.  With FUSED the statistics are not read but made, of
    the one shard that there is, and stored; with few programs a row is still in the L2 then, and read from there: 4 bytes of
    device memory a bf16 logit. Its first reading is STAGES - 1 blocks ahead. A grad of NaN is none: only the statistics are made.
    With MADE dx is what FUSED made for the guess, and is made again where the grad, one number, is another.

    A row whose factor, spread and true are 0 is not read: its gradient is exactly 0, whatever its logits. The rows of dx are
    contiguous, and may be those of x. Of float32 logits it is within a unit in the last place where they count as they are.
    """
    exact: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    wide: tl.constexpr = tl.float64 if exact else tl.float32  # of what a row needs once
    if MADE:
        N = _rows_to_make(N, grad_ptr, guess_ptr, arrived_ptr)
    row = tl.program_id(0).to(tl.int64)
    while row < N:
        offset = row_offset(row, T, stride_xb, stride_xt)
        target = tl.load(target_ptr + row).to(tl.int64)
        ignored = target == ignore_index
        if FUSED:
            others, others_low, target_logit, plain = row_statistics(
                x_ptr, offset, target, part_ptr,
                V, stride_xv, vocab_start, vocab_size, ignore_index, scale, cap, SUM, WEIGHTED, CAP, RAGGED, BLOCK_V,
                STAGES,
            )  # fmt: skip
            _keep(statistics_ptr, row, others, others_low, target_logit, plain, SUM)
            largest, log_sum, log_odds = _odds(others.to(wide), tl.exp(others_low.to(wide)), target_logit.to(wide))
        else:
            columns: tl.constexpr = 4 if SUM else 3
            largest, log_sum, log_odds = _merged(statistics_ptr + row * columns, True, R, stride_r, wide)

        share = 1.0
        if WEIGHTED:
            share = tl.load(weight_ptr + target, mask=(target >= 0) & (target < vocab_size), other=0.0)
        grad = 0.0
        made = True
        if GRAD:
            grad = tl.load(grad_ptr + row * stride_gn).to(wide)
            if FUSED:
                made = grad == grad
            if DENOMINATOR:
                grad /= tl.load(denominator_ptr)
        grad = tl.where(ignored, 0.0, grad)
        pull = grad * share
        even = 0.0  # what reaches all classes by their probability, besides the pull
        spread = 0.0
        if SUM:
            whole = tl.load(whole_ptr).to(wide) if WEIGHTED else vocab_size.to(wide)
            spread = grad * label_smoothing / vocab_size
            pull -= pull * label_smoothing
            even += spread * whole
        if Z_LOSS:
            even += 2.0 * z_loss * tl.where(ignored, 0.0, largest + log_sum) * grad
        if GRAD_LSE:
            even += tl.where(ignored, 0.0, tl.load(grad_lse_ptr + row * stride_ln))
        factor = pull + even
        true = even / (1.0 + tl.exp(log_odds)) - pull / (1.0 + tl.exp(-log_odds)) - spread * share
        true = tl.where(ignored, 0.0, true)
        dead = (factor == 0.0) & (true == 0.0) & (spread == 0.0)
        base, base_low, factor_low, spread_low = largest, log_sum, 0.0, 0.0
        if exact:
            base, base_low = plus(largest.to(tl.float32), log_sum)
            factor, factor_low = in_heads(factor)
            true = true.to(tl.float32)
            if SUM:
                spread, spread_low = in_heads(spread)
        first, count = words(x_ptr, offset, V, RAGGED)
        x_words_ptr = aligned(x_ptr, offset, first, RAGGED)
        dx_words_ptr = aligned(dx_ptr, row * stride_dn, first, RAGGED)
        lanes = tl.arange(0, BLOCK_V)

        if dead:
            for start in range(0, count, BLOCK_V):
                at = start + lanes
                tl.store(dx_words_ptr + at, tl.zeros([BLOCK_V], dx_ptr.dtype.element_ty), mask=at < count)
            if RAGGED:
                cols, in_row = edges(x_ptr, first, count, V)
                tl.store(dx_ptr + row * stride_dn + cols, cols.to(dx_ptr.dtype.element_ty) * 0, mask=in_row)
        elif made:
            local = target - vocab_start
            target_col = tl.where((local >= 0) & (local < V), local, -1).to(tl.int32)
            for start in range(0, count, BLOCK_V):
                at = start + lanes
                write(
                    x_words_ptr + at.to(tl.int64) * stride_xv, dx_words_ptr + at, first + at, at < count,
                    target_col, part_ptr, base, base_low, factor, factor_low, spread, spread_low, true, scale, cap,
                    SUM, WEIGHTED, CAP,
                )  # fmt: skip
            if RAGGED:
                cols, in_row = edges(x_ptr, first, count, V)
                write(
                    x_ptr + offset + cols, dx_ptr + row * stride_dn + cols, cols, in_row,
                    target_col, part_ptr, base, base_low, factor, factor_low, spread, spread_low, true, scale, cap,
                    SUM, WEIGHTED, CAP,
                )  # fmt: skip
        row += tl.num_programs(0)
