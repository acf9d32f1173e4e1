"""Numbers as the unevaluated sum of two float32, the second small beside the first.

The passes over float32 logits compute so: float32 alone cannot give a gradient within a unit in its last place, and many
chips have next to no float64 units. Of Dekker (1971) and Knuth (The Art of Computer Programming 2, 4.2.2); products are of so
few bits that they are exact, so it does not matter whether a compiler fuses them with an addition.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# log(2) in three parts: k times one of the first two is exact in float32 for every k that `exp` meets.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_MIDDLE = tl.constexpr(-0.0002121962606906891)
LN2_LOW = tl.constexpr(1.8206359985041462e-09)
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to an integer, in its low bits
NEAREST_BITS = tl.constexpr(0x4B400000)


@triton.jit
def two_sum(a, b):
    """a + b, exactly."""
    high = a + b
    of_b = high - a
    return high, (a - (high - of_b)) + (b - of_b)


@triton.jit
def head(a):
    """The first 12 bits of a float32; the rest has as many."""
    return (a.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def times(high, low, first, rest):
    """high + low times a number that is given as its `head` and a rest."""
    front = head(high)
    low += high - front
    return front * first, (front * rest + low * first) + low * rest


@triton.jit
def exp(high, low):
    """exp(high + low) / 2**k as two float32, and k; within 2**-26 of itself. high: -110 to 88; low: small beside 1."""
    marked = high * LOG2_E + NEAREST
    k = marked.to(tl.int32, bitcast=True) - NEAREST_BITS
    turns = marked - NEAREST
    middle = turns * LN2_MIDDLE
    reduced = high - turns * LN2_HIGH
    r = reduced - middle  # |r| <= log(2) / 2
    low += ((reduced - r) - middle) - turns * LN2_LOW
    series = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0 + r * (1.0 / 40320.0))))
    curve = r * r * (0.5 + r * (1.0 / 6.0 + r * series))
    line = 1.0 + r
    return line, ((r - (line - 1.0)) + curve) + low * (line + curve), k


@triton.jit
def power(k):
    """2**k, for k from -126 to 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)
