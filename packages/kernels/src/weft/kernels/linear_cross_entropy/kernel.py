"""Two elementwise kernels for gradients: `scale` by a scalar on the device, `accumulate` a product into a 24-bit
sum.
"""

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)  # the canonical NaN: rounding up the bits of another NaN may overflow


@triton.jit(do_not_specialize_on_alignment=["factor_ptr"])
def scale(x_ptr, factor_ptr, out_ptr, N, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * factor, multiplied in float32, over N contiguous elements. 0 where x is 0, for any factor.

    IN_PLACE: out is x. If the factor is 1, nothing is then read or written.
    """
    factor = tl.load(factor_ptr)
    if (factor != 1.0) | (not IN_PLACE):
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < N).to(tl.float32)
            scaled = tl.where(x == 0.0, x, x * factor)  # 0 * NaN would be NaN
            tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def accumulate(
    product_ptr, high_ptr, low_ptr, N, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add a float32 product to a sum in 24 bits, over N contiguous elements.

    The 24 bits are the upper bits of a float32: int16 `high`, and uint8 `low`.
    FIRST: there is no sum yet; the product becomes the sum. LAST: the sum is rounded to bfloat16, in `high`.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    total = tl.load(product_ptr + at, mask=inside)
    if not FIRST:
        high = tl.load(high_ptr + at, mask=inside).to(tl.int32)
        low = tl.load(low_ptr + at, mask=inside).to(tl.int32)
        total += ((high << 16) | (low << 8)).to(tl.float32, bitcast=True)
    if LAST:
        tl.store(high_ptr + at, total.to(tl.bfloat16).to(tl.int16, bitcast=True), mask=inside)
    else:
        bits = total.to(tl.int32, bitcast=True)
        bits = tl.where(total == total, bits + 0x7F + ((bits >> 8) & 1), NAN)  # to the nearest, ties to even
        tl.store(high_ptr + at, (bits >> 16).to(tl.int16), mask=inside)
        tl.store(low_ptr + at, (bits >> 8).to(tl.uint8), mask=inside)
