"""Multiplies a tensor by a number that lies on the device, and in place leaves it alone where that is 1."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["factor_ptr"])
def scale(x_ptr, factor_ptr, out_ptr, N, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * factor in float32, 0 where x is, over N contiguous elements; IN_PLACE out is x."""
    factor = tl.load(factor_ptr)
    if (factor != 1.0) | (not IN_PLACE):
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < N).to(tl.float32)
            scaled = tl.where(x == 0.0, x, x * factor)  # a factor that is no number would make one of it
            tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask=at < N)
