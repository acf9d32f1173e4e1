"""Double-float arithmetic: a number as the unevaluated sum of two float32, the second small next to the first.

Used in the passes over float32 logits: float32 alone cannot compute a gradient within a unit in the last place, and
many chips have next to no float64 units. The sums are from Dekker (1971) and Knuth (The Art of Computer Programming
2, 4.2.2). Factors have few enough bits for exact products, so fused multiply-add instructions do not change the
result.
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
