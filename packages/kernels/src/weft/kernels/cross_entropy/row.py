"""What the kernels do with a row of logits: where it lies, its statistics, and the writing of its gradient."""

import triton
import triton.language as tl

from .double_float import exp, head, power, times, two_sum

# The lowest finite float32, as the running maximum before any logit. With -inf there, -inf - -inf would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NOTHING = tl.constexpr(-110.0)  # exp of it is 0 in float32
NEAR = tl.constexpr(60.0)  # of a base to the largest logit: sums of exp(logit - base) neither overflow nor lose digits
SMALL = tl.constexpr(0.2)  # below it tanh is its series: of (1 - e) / (1 + e) the difference would lose digits there


@triton.jit
def plus(a, b):
    """A float32, and a number of that or of float64, as two float32, of which the first is the nearest to their sum."""
    front = b.to(tl.float32)
    high, low = two_sum(a, front)
    return high, low + (b - front).to(tl.float32)


@triton.jit
def in_heads(x):
    """A float64 as a `head` and a float32 beside it; what is infinite as its head alone."""
    first = head(x.to(tl.float32))
    return first, tl.where(x == first, 0.0, x - first).to(tl.float32)


@triton.jit
def row_offset(row, T, stride_b, stride_t):
    return (row // T) * stride_b + (row % T) * stride_t


@triton.jit
def words(ptr, offset, V, RAGGED: tl.constexpr):
    """The first class of a row that whole words hold, and how many they hold; all, where rows are not RAGGED."""
    if not RAGGED:
        return 0, V
    size: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    first = tl.minimum((size - offset % size) % size, V).to(tl.int32)
    return first, tl.multiple_of((V - first) // size * size, size)


@triton.jit
def edges(ptr, first, count, V):
    """The classes that no whole words hold; and which of these lanes are one."""
    size: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, 2 * size)
    cols = tl.where(lanes < size, lanes, first + count + lanes - size)
    return cols, cols < tl.where(lanes < size, first, V)


@triton.jit
def aligned(ptr, offset, first, RAGGED: tl.constexpr):
    """Where `first` of a row lies; of a RAGGED row at the beginning of a word."""
    if not RAGGED:
        return ptr + offset
    size: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return ptr + tl.multiple_of(offset + first, size)


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


@triton.jit
def _read(
    ptr, cols, in_row, target_col, part_ptr, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """What some logits count as, -inf at the target and outside of the row; and what they add to the sum of all."""
    x = tl.load(ptr, mask=in_row, other=-float("inf")).to(tl.float32)
    x = _counted(x, scale, cap, CAP)
    plain = tl.zeros_like(x)
    if SUM:
        plain = tl.where(in_row, x, 0.0)
        if WEIGHTED:
            plain *= tl.load(part_ptr + cols, mask=in_row, other=0.0)
    return tl.where(in_row & (cols != target_col), x, -float("inf")), plain


@triton.jit
def row_statistics(
    x_ptr, offset, target, part_ptr,
    V, stride_xv, vocab_start, vocab_size, ignore_index, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The columns of `statistics`, of one row."""
    ignored = target == ignore_index
    classes_read = tl.where(ignored, 0, V)

    local = target - vocab_start
    is_here = (local >= 0) & (local < classes_read)
    target_logit = tl.load(x_ptr + offset + local * stride_xv, mask=is_here, other=0.0).to(tl.float32)
    target_logit = tl.where(is_here, _counted(target_logit, scale, cap, CAP), 0.0)
    target_col = tl.where(is_here, local, -1).to(tl.int32)

    if x_ptr.dtype.element_ty == tl.float32:
        largest, total, plain = _exact_sum(
            x_ptr + offset, classes_read, stride_xv, target_logit, target_col, part_ptr, scale, cap,
            SUM, WEIGHTED, CAP, BLOCK_V, STAGES,
        )  # fmt: skip
    else:
        largest, total, plain = _sum(
            x_ptr, offset, classes_read, V, stride_xv, target_col, part_ptr, scale, cap,
            SUM, WEIGHTED, CAP, RAGGED, BLOCK_V, STAGES,
        )  # fmt: skip
    high, low = plus(largest, tl.log(total))
    high = tl.where(total == 0.0, -float("inf"), high)
    low = tl.where(total == 0.0, 0.0, low)
    is_class = (target >= 0) & (target < vocab_size)
    tl.device_assert(ignored | is_class, "a target is no class")  # where Triton is told to debug
    low = tl.where(ignored | is_class, low, float("nan"))
    return high, low, target_logit, plain


@triton.jit
def _sum(
    x_ptr, offset, classes_read, V, stride_xv, target_col, part_ptr, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The largest logit, the sum of exp(logit - largest), 0 where all are -inf, and the sum of the logits.

    Each lane keeps a maximum and a sum of its own and the lanes meet once, after the loop, so the loop has no barrier.
    Of exp(old - new) and exp(x - new) one is always exp(0), so a logit costs one exponential.
    """
    lanes = tl.arange(0, BLOCK_V)
    largest = tl.full([BLOCK_V], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    plain = tl.zeros([BLOCK_V], tl.float32)
    first, count = words(x_ptr, offset, V, RAGGED)
    words_ptr = aligned(x_ptr, offset, first, RAGGED)
    for start in tl.range(0, tl.minimum(classes_read, count), BLOCK_V, num_stages=STAGES):
        at = start + lanes
        x, more = _read(
            words_ptr + at.to(tl.int64) * stride_xv, first + at, at < count, target_col, part_ptr, scale, cap,
            SUM, WEIGHTED, CAP,
        )  # fmt: skip
        plain += more
        rise = x - largest
        fade = tl.exp(-tl.abs(rise))
        total = tl.where(rise > 0, total * fade + 1.0, total + fade)
        largest = tl.maximum(largest, x)
    row_largest = tl.max(largest, 0)
    row_plain = tl.sum(plain, 0)
    if RAGGED:
        cols, in_row = edges(x_ptr, first, count, V)
        x, more = _read(
            x_ptr + offset + cols, cols, in_row & (cols < classes_read), target_col, part_ptr, scale, cap,
            SUM, WEIGHTED, CAP,
        )  # fmt: skip
        row_largest = tl.maximum(row_largest, tl.max(x, 0))
        row_plain += tl.sum(more, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    if RAGGED:
        row_total += tl.sum(tl.exp(x - row_largest), 0)
    return row_largest, row_total, row_plain


@triton.jit
def _exact_sum(
    x_ptr, classes_read, stride_xv, guess, target_col, part_ptr, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A base, the sum of exp(logit - base) in float64, 0 where all are -inf, and the sum of the logits.

    guess: of the base. Where the largest logit is not NEAR it, which a likely class' is, the row is read a second time.
    """
    lanes = tl.arange(0, BLOCK_V)
    base = tl.where(guess == -float("inf"), 0.0, guess)
    row_total, row_plain = base.to(tl.float64), base  # of the types that they will have
    tries = 0
    while tries < 2:
        largest = tl.full([BLOCK_V], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_V], tl.float32)
        rest = tl.zeros([BLOCK_V], tl.float32)
        plain = tl.zeros([BLOCK_V], tl.float32)
        for start in tl.range(0, classes_read, BLOCK_V, num_stages=STAGES):
            at = start + lanes
            x, more = _read(
                x_ptr + at.to(tl.int64) * stride_xv, at, at < classes_read, target_col, part_ptr, scale, cap,
                SUM, WEIGHTED, CAP,
            )  # fmt: skip
            plain += more
            largest = tl.maximum(largest, x)
            below, low, nothing = _below(x, base)
            high, low, k = exp(below, low)
            share = tl.where(nothing, 0.0, power(tl.maximum(k, -126)))
            total, lost = two_sum(total, high * share)
            rest += lost + low * share
        row_largest = tl.max(largest, 0)
        row_total = tl.sum(total.to(tl.float64) + rest.to(tl.float64), 0)
        row_plain = tl.sum(plain, 0)
        near = (tl.abs(row_largest - base) <= NEAR) | (row_largest == -float("inf"))
        base = tl.where(near, base, row_largest)
        tries = tl.where(near, 2, tries + 1)
    return base, row_total, row_plain


@triton.jit
def _below(x, base):
    """x - base as two float32, and whether `exp` of it is nothing, which it must not be asked then."""
    nothing = x - base < NOTHING
    high, low = two_sum(tl.where(nothing, base, x), -base)
    return high, low, nothing


@triton.jit
def write(
    x_ptr, dx_ptr, cols, in_row, target_col, part_ptr,
    base, base_low, factor, factor_low, spread, spread_low, true, scale, cap,
    SUM: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The gradient of some logits of a row: factor * exp(x - base), less spread times the class's weight with SUM."""
    x = tl.load(x_ptr, mask=in_row, other=-float("inf")).to(tl.float32)
    counted = _counted(x, scale, cap, CAP)
    weight = 1.0
    if SUM and WEIGHTED:
        weight = tl.load(part_ptr + cols, mask=in_row, other=0.0)
    if x_ptr.dtype.element_ty == tl.float32:
        below, low, nothing = _below(counted, base)
        both = below + (low - base_low)  # of logits beyond 2**24 base_low is not small
        dx, dx_rest, k = exp(both, (low - base_low) - (both - below))
        dx, dx_rest = times(dx, dx_rest, factor, factor_low)
        half = tl.where(nothing, 0.0, power(k >> 1))  # 2**k itself may be no float32
        dx, dx_rest = dx * half * power(k - (k >> 1)), dx_rest * half * power(k - (k >> 1))
        if SUM:
            if WEIGHTED:
                spread, spread_low = times(weight, 0.0, spread, spread_low)
            dx, lost = two_sum(dx, -spread)
            dx_rest += lost - spread_low
        dx += dx_rest
    else:
        # Not x - (base + base_low): that sum rounds at the size of the logits, not at that of the difference.
        dx = factor * tl.exp((counted - base) - base_low)
        if SUM:
            dx -= spread * weight
    dx = tl.where(cols == target_col, true, dx) * scale
    if CAP:
        _, slope = _tanh(x * (scale / cap))
        dx *= slope
    tl.store(dx_ptr, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
