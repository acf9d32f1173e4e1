"""The two passes over the logits: `statistics` (2 bytes a bf16 logit) and `gradient` (4). They know no torch, no ranks.

Row `n` of the logits is row `n % T` of batch `n // T`, so a slice such as `logits[:, :-1]` is read where it lies.
Offsets are 64-bit: rows times stride, and classes times the stride of transposed logits, both pass 2**31.
A logit x counts as scale * x, or where there is a CAP as cap * tanh(scale * x / cap).
"""

import triton
import triton.language as tl

# The lowest finite float32, as the running maximum before any logit. With -inf there, -inf - -inf would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
SMALL = tl.constexpr(0.2)  # below it tanh is its series: of (1 - e) / (1 + e) the difference would lose digits there


@triton.jit
def _row_offset(T, stride_b, stride_t):
    row = tl.program_id(0).to(tl.int64)
    return (row // T) * stride_b + (row % T) * stride_t


@triton.jit
def _tanh(u):
    """tanh(u), and its derivative 1 - tanh(u)**2 without the difference; both within some 2**-22 of themselves."""
    e = tl.exp(-2.0 * tl.abs(u))
    v = u * u
    series = u * (1.0 - v * (1.0 / 3.0 - v * (2.0 / 15.0 - v * (17.0 / 315.0 - v * (62.0 / 2835.0)))))
    far = tl.where(u < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(u) < SMALL, series, far), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _counted(x, scale, cap, CAP: tl.constexpr):
    """What a logit counts as."""
    if CAP:
        bent, _ = _tanh(x * (scale / cap))
        return cap * bent
    return x * scale


# What differs between ranks or calls without mattering to the generated code is not compiled in.
@triton.jit(do_not_specialize=["T", "vocab_start", "vocab_size", "ignore_index", "scale", "cap"])
def statistics(
    x_ptr, target_ptr, weight_ptr, statistics_ptr,
    V, T, stride_xb, stride_xt, stride_xv,
    vocab_start, vocab_size, ignore_index, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row: the largest logit and the sum of exp(logit - largest), both without the target; the target's logit; and
    with SUM the sum of all logits, each times its class's weight where they are WEIGHTED.

    The third is 0 where this shard does not hold the target. An ignored row is not read: -inf, 0, 0, 0.
    A target that is no class makes the second NaN, and so the loss: a kernel cannot raise.

    Each lane keeps a maximum and a sum of its own and the lanes meet once, after the loop, so the loop has no barrier.
    Of exp(old - new) and exp(x - new) one is always exp(0), so a logit costs one exponential.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_offset(T, stride_xb, stride_xt)
    target = tl.load(target_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    classes_read = tl.where(ignored, 0, V)

    local = target - vocab_start
    is_here = (local >= 0) & (local < classes_read)
    target_logit = tl.load(x_ptr + local * stride_xv, mask=is_here, other=0.0).to(tl.float32)
    target_logit = tl.where(is_here, _counted(target_logit, scale, cap, CAP), 0.0)
    target_col = tl.where(is_here, local, -1).to(tl.int32)

    lanes = tl.arange(0, BLOCK_V)
    largest = tl.full([BLOCK_V], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    plain = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, classes_read, BLOCK_V):
        cols = start + lanes
        in_row = cols < V
        x = tl.load(x_ptr + cols.to(tl.int64) * stride_xv, mask=in_row, other=-float("inf")).to(tl.float32)
        x = _counted(x, scale, cap, CAP)
        if SUM:
            if WEIGHTED:
                weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
                plain += weight * tl.where(in_row, x, 0.0)
            else:
                plain += tl.where(in_row, x, 0.0)
        x = tl.where(in_row & (cols != target_col), x, -float("inf"))
        rise = x - largest
        fade = tl.exp(-tl.abs(rise))
        total = tl.where(rise > 0, total * fade + 1.0, total + fade)
        largest = tl.maximum(largest, x)

    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    # The largest logit adds 1, so a sum of 0 means that every one was -inf, or that there was none.
    row_largest = tl.where(row_total == 0.0, -float("inf"), row_largest)
    is_class = (target >= 0) & (target < vocab_size)
    row_total = tl.where(ignored | is_class, row_total, float("nan"))

    columns: tl.constexpr = 4 if SUM else 3
    tl.store(statistics_ptr + row * columns, row_largest)
    tl.store(statistics_ptr + row * columns + 1, row_total)
    tl.store(statistics_ptr + row * columns + 2, target_logit)
    if SUM:
        tl.store(statistics_ptr + row * columns + 3, tl.sum(plain, 0))


@triton.jit(do_not_specialize=["T", "vocab_start", "scale", "cap"])
def gradient(
    x_ptr, target_ptr, weight_ptr, largest_ptr, log_sum_ptr, factor_ptr, spread_ptr, true_ptr, dx_ptr,
    V, T, stride_xb, stride_xt, stride_xv, stride_dn,
    vocab_start, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row: factor * softmax, less spread times each class's weight with SUM; `true` in the true class's place; times
    the derivative of what a logit counts as. See `reference.gradient`.

    A row whose factor, spread and true are 0 is not read: its gradient is exactly 0, whatever its logits. The rows of dx are
    contiguous, and may be those of x.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += _row_offset(T, stride_xb, stride_xt)
    dx_ptr += row * stride_dn
    factor = tl.load(factor_ptr + row)
    true = tl.load(true_ptr + row)
    spread = tl.load(spread_ptr + row) if SUM else 0.0
    lanes = tl.arange(0, BLOCK_V)

    if (factor == 0.0) & (true == 0.0) & (spread == 0.0):
        for start in range(0, V, BLOCK_V):
            cols = start + lanes
            tl.store(dx_ptr + cols, tl.zeros([BLOCK_V], dx_ptr.dtype.element_ty), mask=cols < V)
    else:
        largest = tl.load(largest_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        local = tl.load(target_ptr + row).to(tl.int64) - vocab_start
        target_col = tl.where((local >= 0) & (local < V), local, -1).to(tl.int32)
        for start in range(0, V, BLOCK_V):
            cols = start + lanes
            in_row = cols < V
            x = tl.load(x_ptr + cols.to(tl.int64) * stride_xv, mask=in_row, other=-float("inf")).to(tl.float32)
            # Not x - (largest + log_sum): that sum rounds at the size of the logits, not at that of the difference.
            dx = factor * tl.exp((_counted(x, scale, cap, CAP) - largest) - log_sum)
            if SUM:
                if WEIGHTED:
                    dx -= spread * tl.load(weight_ptr + cols, mask=in_row, other=0.0)
                else:
                    dx -= spread
            dx = tl.where(cols == target_col, true, dx) * scale
            if CAP:
                _, slope = _tanh(x * (scale / cap))
                dx *= slope
            tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
