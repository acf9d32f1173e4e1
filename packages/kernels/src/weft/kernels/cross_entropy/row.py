"""Device functions of the kernels for one row of logits: addresses, statistics, and storing the gradient.

kernel.py explains RAGGED, scale, cap and arguments that are None. The first functions are double-float arithmetic: a
number is the unevaluated sum of two float32, the second small next to the first, for gradients of float32 logits within
a unit in the last place. Sums: Dekker (1971), Knuth (The Art of Computer Programming 2, 4.2.2). Products are exact.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# log(2) in three parts. k times the first or the second is exact in float32 for every k in `exp`.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_MIDDLE = tl.constexpr(-0.0002121962606906891)
LN2_LOW = tl.constexpr(1.8206359985041462e-09)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: the low bits of x + ROUND are the integer nearest to x
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def two_sum(a, b):
    """a + b exactly: the rounded sum and the rounding error."""
    total = a + b
    b_added = total - a
    return total, (a - (total - b_added)) + (b - b_added)


@triton.jit
def head(a):
    """The upper 12 bits of a float32's significand. The tail, a - head(a), has 12 bits too."""
    return (a.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def times(hi, lo, factor_head, factor_tail):
    """(hi + lo) * (factor_head + factor_tail), where factor_head is a `head`."""
    hi_head = head(hi)
    tail = lo + (hi - hi_head)
    return hi_head * factor_head, (hi_head * factor_tail + tail * factor_head) + tail * factor_tail


@triton.jit
def exp(hi, lo):
    """exp(hi + lo) / 2**k as two float32, and k, with a relative error below 2**-26.

    hi: -110 to 88. lo: small next to 1. Range reduction by Cody and Waite: hi + lo = k * log(2) + r + r_lo. Then
        exp(r) is a Taylor series.
    """
    rounded = hi * LOG2_E + ROUND
    k = rounded.to(tl.int32, bitcast=True) - ROUND_BITS
    k_float = rounded - ROUND
    k_middle = k_float * LN2_MIDDLE
    reduced = hi - k_float * LN2_HIGH
    r = reduced - k_middle  # |r| <= log(2) / 2
    r_lo = lo + (((reduced - r) - k_middle) - k_float * LN2_LOW)
    series = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0 + r * (1.0 / 40320.0))))
    from_r_squared = r * r * (0.5 + r * (1.0 / 6.0 + r * series))
    one_plus_r = 1.0 + r
    return one_plus_r, ((r - (one_plus_r - 1.0)) + from_r_squared) + r_lo * (one_plus_r + from_r_squared), k


@triton.jit
def exp2(k):
    """2**k, for k from -126 to 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


LOWEST = tl.constexpr(-3.4028234663852886e38)  # the first running maximum: with -inf, -inf - -inf would be NaN
UNDERFLOW = tl.constexpr(-110.0)  # exp(UNDERFLOW) is 0 in float32
# The greatest distance of base from max for which sums of exp(logit - base) neither overflow nor lose digits.
NEAR = tl.constexpr(60.0)
SMALL = tl.constexpr(0.2)  # below SMALL, tanh is a Taylor series: the difference in (1 - e) / (1 + e) would lose digits


@triton.jit
def plus(a, b):
    """a + b as two float32: the sum rounded to nearest, and the rounding error. a: float32. b: float32 or float64."""
    b_hi = b.to(tl.float32)
    hi, lo = two_sum(a, b_hi)
    return hi, lo + (b - b_hi).to(tl.float32)


@triton.jit
def split(x):
    """A float64 as two float32: a `head` and its tail, which is 0 if x is infinite.

    Used for the factors of the gradient of float32 logits, which are computed in float64.
    """
    x_head = head(x.to(tl.float32))
    return x_head, tl.where(x == x_head, 0.0, x - x_head).to(tl.float32)


@triton.jit
def row_offset(row, T, stride_b, stride_t):
    """The offset in memory of row t of batch b, in elements, where `row` = b * T + t."""
    return (row // T) * stride_b + (row % T) * stride_t


@triton.jit
def aligned_span(ptr, offset, V, RAGGED: tl.constexpr):
    """The columns that a loop over a row visits, as (first, count). `unaligned_cols` has the remaining columns.

    For a RAGGED row, the columns in aligned 16-byte words; otherwise all V columns.
    offset: of the row, from `row_offset`.
    """
    if not RAGGED:
        return 0, V
    size: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    first = tl.minimum((size - offset % size) % size, V).to(tl.int32)
    return first, tl.multiple_of((V - first) // size * size, size)


@triton.jit
def unaligned_cols(ptr, first, count, V):
    """The columns of a RAGGED row before and after its `aligned_span`, and a mask of the lanes in use.

    Each lane gets one column: the first half of the lanes those before the span, the second half those after.
    """
    size: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, 2 * size)
    cols = tl.where(lanes < size, lanes, first + count + lanes - size)
    return cols, cols < tl.where(lanes < size, first, V)


@triton.jit
def aligned(ptr, offset, first, RAGGED: tl.constexpr):
    """The pointer to column `first` of a row, marked as 16-byte aligned for a RAGGED row."""
    if not RAGGED:
        return ptr + offset
    size: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return ptr + tl.multiple_of(offset + first, size)


@triton.jit
def tanh(u, e):
    """tanh(u) and its derivative, each with a relative error of about 2**-22. e: exp(-2 * abs(u)).

    The derivative is not computed as 1 - tanh(u)**2, whose digits would cancel.
    """
    v = u * u
    series = u * (1.0 - v * (1.0 / 3.0 - v * (2.0 / 15.0 - v * (17.0 / 315.0 - v * (62.0 / 2835.0)))))
    far = tl.where(u < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(u) < SMALL, series, far), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _scaled(x, scale, cap):
    """The logit after scale and cap."""
    if cap is not None:
        u = x * (scale / cap)
        bounded, _ = tanh(u, tl.exp(-2.0 * tl.abs(u)))
        return cap * bounded
    return x * scale


@triton.jit
def _read(
    ptr, cols, in_row, target_col, shard_weight_ptr, shift, scale, cap,
    SUM: tl.constexpr,
):  # fmt: skip
    """Load logits, apply scale and cap, and set the target and columns outside the row to -inf.

    Also returns each logit's summand of the sum of logit - shift, times the class's weight if there are weights.
    """
    x = tl.load(ptr, mask=in_row, other=-float("inf")).to(tl.float32)
    x = _scaled(x, scale, cap)
    logit_sum = tl.zeros_like(x)
    if SUM:
        logit_sum = tl.where(in_row, x - shift, 0.0)
        if shard_weight_ptr is not None:
            logit_sum *= tl.load(shard_weight_ptr + cols, mask=in_row, other=0.0)
    return tl.where(in_row & (cols != target_col), x, -float("inf")), logit_sum


@triton.jit
def _next_above(x):
    """The next float32 above x; for 0, the smallest normal float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0x00800000, tl.where(x > 0.0, bits + 1, bits - 1))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def row_statistics(
    x_ptr, offset, target, shard_weight_ptr, shard_weight_sum_ptr,
    V, stride_xv, vocab_start, vocab_size, ignore_index, scale, cap,
    SUM: tl.constexpr, RIVAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo and rival of a row: see `kernel.statistics`.

    SUM: compute logit_sum and logit_sum_lo, for label smoothing. RIVAL: compute the rival, for the token accuracy: the
    largest logit other than the target's, or the next float above if a column before the target has this largest logit.
    The sum is taken over logit - shift, with the row's first logit as shift: a sum of large logits would be rounded
    at their magnitude.
    """
    ignored = target == ignore_index
    classes_read = tl.where(ignored, 0, V)

    local = target - vocab_start
    is_here = (local >= 0) & (local < classes_read)
    target_logit = tl.load(x_ptr + offset + local * stride_xv, mask=is_here, other=0.0).to(tl.float32)
    target_logit = tl.where(is_here, _scaled(target_logit, scale, cap), 0.0)
    target_col = tl.where(is_here, local, -1).to(tl.int32)
    shift = 0.0
    if SUM:
        first_logit = tl.load(x_ptr + offset, mask=classes_read > 0, other=0.0).to(tl.float32)
        shift = _scaled(first_logit, scale, cap)
        shift = tl.where(tl.abs(shift) < float("inf"), shift, 0.0)

    if x_ptr.dtype.element_ty == tl.float32:
        base, sum_exp, logit_sum, largest, before = _exact_sum(
            x_ptr + offset, classes_read, stride_xv, target_logit, target_col, local,
            shard_weight_ptr, shift, scale, cap, SUM, RIVAL, BLOCK_V, STAGES,
        )  # fmt: skip
    else:
        base, sum_exp, logit_sum, before = _sum(
            x_ptr, offset, classes_read, V, stride_xv, target_col, local, shard_weight_ptr, shift, scale, cap,
            SUM, RIVAL, RAGGED, BLOCK_V, STAGES,
        )  # fmt: skip
        largest = base
    rival = largest
    if RIVAL:
        rival = tl.where(before == largest, _next_above(largest), largest)
    lse_hi, lse_lo = plus(base, tl.log(sum_exp))
    lse_hi = tl.where(sum_exp == 0.0, -float("inf"), lse_hi)
    lse_lo = tl.where(sum_exp == 0.0, 0.0, lse_lo)
    is_class = (target >= 0) & (target < vocab_size)
    tl.device_assert(ignored | is_class, "a target is no class")  # checked only in Triton's debug mode
    lse_lo = tl.where(ignored | is_class, lse_lo, float("nan"))
    logit_sum_lo = 0.0
    if SUM:
        weight_sum = tl.cast(classes_read, tl.float64)
        if shard_weight_sum_ptr is not None:
            weight_sum = tl.load(shard_weight_sum_ptr, mask=~ignored, other=0.0)
        total = weight_sum * shift.to(tl.float64) + logit_sum.to(tl.float64)
        logit_sum = total.to(tl.float32)
        rounded = logit_sum.to(tl.float64)
        logit_sum_lo = tl.where(rounded == total, 0.0, total - rounded).to(tl.float32)
    return lse_hi, lse_lo, target_logit, logit_sum, logit_sum_lo, rival


@triton.jit
def _sum(
    x_ptr, offset, classes_read, V, stride_xv, target_col, local, shard_weight_ptr, shift, scale, cap,
    SUM: tl.constexpr, RIVAL: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One online pass over a row: its max, the sum of exp(logit - max), and the sum of logit - shift.

    With RIVAL also the max of the columns before `local`. The sum of exponentials is 0 if all logits are -inf.

    Each lane has its own running max and sum, reduced once after the loop, so the loop has no barrier. A logit x
    changes the max from old to new = max(old, x), rescales the sum by exp(old - new) and adds exp(x - new). One of
    the two exponentials is exp(0), so a logit costs a single exponential.
    """
    lanes = tl.arange(0, BLOCK_V)
    largest = tl.full([BLOCK_V], LOWEST, tl.float32)
    sum_exp = tl.zeros([BLOCK_V], tl.float32)
    logit_sum = tl.zeros([BLOCK_V], tl.float32)
    before = tl.full([BLOCK_V], -float("inf"), tl.float32)
    first, count = aligned_span(x_ptr, offset, V, RAGGED)
    aligned_ptr = aligned(x_ptr, offset, first, RAGGED)
    for start in tl.range(0, tl.minimum(classes_read, count), BLOCK_V, num_stages=STAGES):
        at = start + lanes
        x, added = _read(
            aligned_ptr + at.to(tl.int64) * stride_xv, first + at, at < count, target_col,
            shard_weight_ptr, shift, scale, cap, SUM,
        )  # fmt: skip
        logit_sum += added
        delta = x - largest
        decay = tl.exp(-tl.abs(delta))
        sum_exp = tl.where(delta > 0, sum_exp * decay + 1.0, sum_exp + decay)
        largest = tl.maximum(largest, x)
        if RIVAL:
            before = tl.maximum(before, tl.where(first + at < local, x, -float("inf")))
    row_largest = tl.max(largest, 0)
    row_before = row_largest
    if RIVAL:
        row_before = tl.max(before, 0)
    row_logit_sum = tl.sum(logit_sum, 0)
    if RAGGED:
        cols, in_row = unaligned_cols(x_ptr, first, count, V)
        x, added = _read(
            x_ptr + offset + cols, cols, in_row & (cols < classes_read), target_col,
            shard_weight_ptr, shift, scale, cap, SUM,
        )  # fmt: skip
        row_largest = tl.maximum(row_largest, tl.max(x, 0))
        if RIVAL:
            row_before = tl.maximum(row_before, tl.max(tl.where(cols < local, x, -float("inf")), 0))
        row_logit_sum += tl.sum(added, 0)
    row_sum_exp = tl.sum(sum_exp * tl.exp(largest - row_largest), 0)
    if RAGGED:
        row_sum_exp += tl.sum(tl.exp(x - row_largest), 0)
    return row_largest, row_sum_exp, row_logit_sum, row_before


@triton.jit
def _exact_sum(
    x_ptr, classes_read, stride_xv, target_logit, target_col, local, shard_weight_ptr, shift, scale, cap,
    SUM: tl.constexpr, RIVAL: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For a row of float32 logits: a base, the sum of exp(logit - base) in float64, the sum of logit - shift, and
    max.

    With RIVAL also the max of the columns before `local`. The sum of exponentials is 0 if all logits are -inf.

    The first base is the target's logit, near the max if the target is likely. If the max is not NEAR the base, the
    row is read a second time with the max as base.
    """
    lanes = tl.arange(0, BLOCK_V)
    base = tl.where(target_logit == -float("inf"), 0.0, target_logit)
    # initialized in their final types, as Triton's loop requires
    row_sum_exp, row_logit_sum = base.to(tl.float64), base
    row_largest, row_before = base, base
    tries = 0
    while tries < 2:
        largest = tl.full([BLOCK_V], -float("inf"), tl.float32)
        sum_exp = tl.zeros([BLOCK_V], tl.float32)
        sum_exp_lo = tl.zeros([BLOCK_V], tl.float32)
        logit_sum = tl.zeros([BLOCK_V], tl.float32)
        before = tl.full([BLOCK_V], -float("inf"), tl.float32)
        for start in tl.range(0, classes_read, BLOCK_V, num_stages=STAGES):
            at = start + lanes
            x, added = _read(
                x_ptr + at.to(tl.int64) * stride_xv, at, at < classes_read, target_col,
                shard_weight_ptr, shift, scale, cap, SUM,
            )  # fmt: skip
            logit_sum += added
            largest = tl.maximum(largest, x)
            if RIVAL:
                before = tl.maximum(before, tl.where(at < local, x, -float("inf")))
            delta, delta_lo, underflows = _minus(x, base)
            exp_hi, exp_lo, k = exp(delta, delta_lo)
            two_to_k = tl.where(underflows, 0.0, exp2(tl.maximum(k, -126)))
            sum_exp, rounded_off = two_sum(sum_exp, exp_hi * two_to_k)
            sum_exp_lo += rounded_off + exp_lo * two_to_k
        row_largest = tl.max(largest, 0)
        if RIVAL:
            row_before = tl.max(before, 0)
        row_sum_exp = tl.sum(sum_exp.to(tl.float64) + sum_exp_lo.to(tl.float64), 0)
        row_logit_sum = tl.sum(logit_sum, 0)
        near = (tl.abs(row_largest - base) <= NEAR) | (row_largest == -float("inf"))
        base = tl.where(near, base, row_largest)
        tries = tl.where(near, 2, tries + 1)
    return base, row_sum_exp, row_logit_sum, row_largest, row_before


@triton.jit
def _minus(x, base):
    """x - base as two float32, and whether exp of the difference underflows to 0.

    On underflow both are 0, which `double_float.exp` can take.
    """
    underflows = x - base < UNDERFLOW
    delta, delta_lo = two_sum(tl.where(underflows, base, x), -base)
    return delta, delta_lo, underflows


@triton.jit
def write(
    x_ptr, dx_ptr, cols, in_row, target_col, shard_weight_ptr,
    base, base_lo, softmax_scale, softmax_scale_lo, smoothing, smoothing_lo, target_grad, scale, cap,
    SUM: tl.constexpr,
):  # fmt: skip
    """Store the gradient of some logits of a row: softmax_scale * exp(x - lse), and target_grad at the target.

    The lse is base + base_lo. With SUM, `smoothing` is subtracted, times the class's weight if there are weights.
    softmax_scale_lo, smoothing_lo: the low parts of double-floats, for float32 logits.
    """
    x = tl.load(x_ptr, mask=in_row, other=-float("inf")).to(tl.float32)
    scaled = _scaled(x, scale, cap)
    weight = 1.0
    if SUM and shard_weight_ptr is not None:
        weight = tl.load(shard_weight_ptr + cols, mask=in_row, other=0.0)
    if x_ptr.dtype.element_ty == tl.float32:
        delta, delta_lo, underflows = _minus(scaled, base)
        delta_lo -= base_lo
        exponent = delta + delta_lo  # split into hi and lo again: for logits beyond 2**24 base_lo is not small
        dx, dx_lo, k = exp(exponent, delta_lo - (exponent - delta))
        dx, dx_lo = times(dx, dx_lo, softmax_scale, softmax_scale_lo)
        half = tl.where(underflows, 0.0, exp2(k >> 1))  # 2**k as two factors, because 2**k itself may not be a float32
        dx, dx_lo = dx * half * exp2(k - (k >> 1)), dx_lo * half * exp2(k - (k >> 1))
        if SUM:
            if shard_weight_ptr is not None:
                smoothing, smoothing_lo = times(weight, 0.0, smoothing, smoothing_lo)
            dx, rounded_off = two_sum(dx, -smoothing)
            dx_lo += rounded_off - smoothing_lo
        dx += dx_lo
    else:
        # Not x - (base + base_lo): that sum would be rounded at the magnitude of the logits, not of the difference.
        dx = softmax_scale * tl.exp((scaled - base) - base_lo)
        if SUM:
            dx -= smoothing * weight
    dx = tl.where(cols == target_col, target_grad, dx) * scale
    if cap is not None:
        u = x * (scale / cap)
        _, slope = tanh(u, tl.exp(-2.0 * tl.abs(u)))
        dx *= slope
    tl.store(dx_ptr, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
