"""Dropout in one pass: each element is read once and written once, and the mask is never in memory."""

import triton
import triton.language as tl

from ..random.kernel import UNSPECIALIZED, blocks, columns, halves, run_start, tile


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "threshold"])
def masked(
    x_ptr, residual_ptr, y_ptr,
    rows, R1, R2, N, stride_x0, stride_x1, stride_x2, stride_xn, offset, stride_0, stride_1, stride_2,
    key, threshold, scale,
    SHIFTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """y = dropout of x, plus the residual: an element is kept where its 16 random bits are `threshold` or more.

    Runs and tiles are those of `random.kernel`. y and the residual are contiguous.
    """
    row, first = tile(N, SHIFTED, ROWS, GROUPS, 8)
    start = offset + run_start(row, R1, R2, stride_0, stride_1, stride_2)
    b0, b1, b2, b3 = blocks(start, first, key, GROUPS, 8)
    keep = halves(b0, b1, b2, b3, ROWS, GROUPS) >= threshold.to(tl.uint32)
    cols = columns(start, first, SHIFTED, GROUPS, 8)
    in_part = (row < rows)[:, None] & (cols >= 0) & (cols < N)
    x_row = run_start(row, R1, R2, stride_x0, stride_x1, stride_x2)
    x = tl.load(x_ptr + x_row[:, None] + cols * stride_xn, mask=in_part, other=0.0).to(tl.float32)
    y = tl.where(keep, x * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + row[:, None] * N + cols, mask=in_part, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * N + cols, y.to(y_ptr.dtype.element_ty), mask=in_part)
