"""Multiplies a tensor by a number that lies on the device, and leaves it alone where that is 1."""

import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, factor_ptr, N, BLOCK: tl.constexpr):
    """x *= factor, over N contiguous elements."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < N).to(tl.float32)
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < N)
