"""Kernels for the tests: the functions of `double_float`, element by element.

The conftest imports them where kernels are interpreted.
"""

import triton
import triton.language as tl
from weft.kernels.cross_entropy import double_float


@triton.jit
def two_sum(a_ptr, b_ptr, high_ptr, low_ptr, N: tl.constexpr):
    """a + b as high and low."""
    at = tl.arange(0, N)
    high, low = double_float.two_sum(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


@triton.jit
def exp(a_ptr, b_ptr, high_ptr, low_ptr, N: tl.constexpr):
    """exp(a + b) as high and low."""
    at = tl.arange(0, N)
    high, low, k = double_float.exp(tl.load(a_ptr + at), tl.load(b_ptr + at))
    half = double_float.exp2(k >> 1)
    tl.store(high_ptr + at, high * half * double_float.exp2(k - (k >> 1)))
    tl.store(low_ptr + at, low * half * double_float.exp2(k - (k >> 1)))
