"""Kernels for the tests: the functions of `double_float`, element by element.

The conftest imports them where kernels are interpreted.
"""

import triton
import triton.language as tl
from weft.kernels.cross_entropy import row


@triton.jit
def two_sum(a_ptr, b_ptr, high_ptr, low_ptr, N: tl.constexpr):
    """a + b as high and low."""
    at = tl.arange(0, N)
    high, low = row.two_sum(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


@triton.jit
def exp(a_ptr, b_ptr, high_ptr, low_ptr, N: tl.constexpr):
    """exp(a + b) as high and low."""
    at = tl.arange(0, N)
    high, low, k = row.exp(tl.load(a_ptr + at), tl.load(b_ptr + at))
    half = row.exp2(k >> 1)
    tl.store(high_ptr + at, high * half * row.exp2(k - (k >> 1)))
    tl.store(low_ptr + at, low * half * row.exp2(k - (k >> 1)))
