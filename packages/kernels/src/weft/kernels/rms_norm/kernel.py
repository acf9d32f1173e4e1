"""RMS norm in a single pass forward, and in a single pass backward: a row stays in registers from load to store.

A tile is ROWS rows by BLOCK_H columns, the first H of which exist. A program computes the tiles program_id, program_id
+ num_programs, program_id + 2 * num_programs, … KEEP_WEIGHT: each program loads the weight once and keeps the weight in
registers; otherwise the weight is loaded from a cache for each tile. Rows are contiguous, with any stride between rows.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x_ptr, residual_ptr, weight_ptr,
    y_ptr, sum_ptr, rrms_ptr,
    N, H, stride_xn, stride_rn,
    eps,
    KEEP_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """y = x * rrms, rounded to x's dtype, times the weight.

    With a residual, x is replaced by sum = x + residual, which is also stored, rounded to its dtype.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)[None, :]
    in_row = cols < H
    if weight_ptr is not None and KEEP_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    for tile in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row = rows[:, None]
        in_tile = in_row & (row < N)
        x = tl.load(x_ptr + row * stride_xn + cols, mask=in_tile, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + row * stride_rn + cols, mask=in_tile, other=0.0).to(tl.float32)
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * H + cols, rounded, mask=in_tile)
            x = rounded.to(tl.float32)
        rrms = 1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)
        tl.store(rrms_ptr + rows, rrms, mask=rows < N)
        y = x * rrms[:, None]
        if weight_ptr is not None:
            if not KEEP_WEIGHT:
                weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + row * H + cols, y.to(y_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def backward(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, rrms_ptr,
    dx_ptr, dweight_ptr,
    N, H, stride_gn, stride_sn, stride_xn,
    KEEP_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """With n = x * rrms and g = grad * weight: dx = rrms * (g - n * mean(g * n)) + grad_sum.

    dweight: [programs, H] in float32, each program's addend of the weight's gradient: the sum of grad * n over the
    program's rows, in order.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)[None, :]
    in_row = cols < H
    if weight_ptr is not None and KEEP_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    if dweight_ptr is not None:
        dweight = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for tile in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row = rows[:, None]
        in_tile = in_row & (row < N)
        grad = tl.load(grad_ptr + row * stride_gn + cols, mask=in_tile, other=0.0).to(tl.float32)
        rrms = tl.load(rrms_ptr + rows, mask=rows < N, other=0.0)[:, None]
        n = tl.load(x_ptr + row * stride_xn + cols, mask=in_tile, other=0.0).to(tl.float32) * rrms
        if dweight_ptr is not None:
            dweight += grad * n
        if dx_ptr is not None:
            if weight_ptr is not None:
                if not KEEP_WEIGHT:
                    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
                grad *= weight.to(tl.float32)
            dx = rrms * (grad - n * (tl.sum(grad * n, 1, keep_dims=True) / H))
            if grad_sum_ptr is not None:
                dx += tl.load(grad_sum_ptr + row * stride_sn + cols, mask=in_tile, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_tile)
    if dweight_ptr is not None:
        total = tl.sum(dweight, 0, keep_dims=True)
        tl.store(dweight_ptr + program.to(tl.int64) * H + cols, total, mask=in_row)
