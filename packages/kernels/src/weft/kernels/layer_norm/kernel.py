"""Layer norm in one pass forward and one backward.

Tiles, programs and KEEP_WEIGHT as in rms_norm.kernel; KEEP_WEIGHT also keeps the bias in registers.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,
    y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    N, H, stride_xn, stride_rn,
    eps,
    KEEP_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * weight + bias, rounded once.

    With a residual, x is replaced by sum = x + residual, which is also stored, rounded to its dtype.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)[None, :]
    in_row = cols < H
    if weight_ptr is not None and KEEP_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    if bias_ptr is not None and KEEP_WEIGHT:
        bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0)
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
        mean = tl.sum(x, 1) / H
        centered = tl.where(in_row, x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, 1) / H + eps)
        tl.store(mean_ptr + rows, mean, mask=rows < N)
        tl.store(rstd_ptr + rows, rstd, mask=rows < N)
        y = centered * rstd[:, None]
        if weight_ptr is not None:
            if not KEEP_WEIGHT:
                weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
            y *= weight.to(tl.float32)
        if bias_ptr is not None:
            if not KEEP_WEIGHT:
                bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0)
            y += bias.to(tl.float32)
        tl.store(y_ptr + row * H + cols, y.to(y_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def backward(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dweight_ptr, dbias_ptr,
    N, H, stride_gn, stride_sn, stride_xn,
    KEEP_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """With n = (x - mean) * rstd and g = grad * weight: dx = rstd * (g - mean(g) - n * mean(g * n)) + grad_sum.

    grad is the gradient of y, grad_sum the gradient of `sum` from its other uses.
    dweight, dbias: [programs, H] in float32, a row for each program: the sums of grad * n and of grad over the rows of
    x in this program. The launch adds up the programs.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)[None, :]
    in_row = cols < H
    if weight_ptr is not None and KEEP_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    if dweight_ptr is not None:
        dweight = tl.zeros((ROWS, BLOCK_H), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for tile in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row = rows[:, None]
        in_tile = in_row & (row < N)
        grad = tl.load(grad_ptr + row * stride_gn + cols, mask=in_tile, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < N, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < N, other=0.0)[:, None]
        n = (tl.load(x_ptr + row * stride_xn + cols, mask=in_tile, other=0.0).to(tl.float32) - mean) * rstd
        if dweight_ptr is not None:
            dweight += grad * n
        if dbias_ptr is not None:
            dbias += grad
        if dx_ptr is not None:
            if weight_ptr is not None:
                if not KEEP_WEIGHT:
                    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
                grad *= weight.to(tl.float32)
            mean_g, mean_gn = tl.sum(grad, 1, keep_dims=True) / H, tl.sum(grad * n, 1, keep_dims=True) / H
            dx = rstd * (grad - mean_g - n * mean_gn)  # grad is 0 beyond H, where n is not
            if grad_sum_ptr is not None:
                dx += tl.load(grad_sum_ptr + row * stride_sn + cols, mask=in_tile, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_tile)
    if dweight_ptr is not None:
        total = tl.sum(dweight, 0, keep_dims=True)
        tl.store(dweight_ptr + program.to(tl.int64) * H + cols, total, mask=in_row)
    if dbias_ptr is not None:
        total = tl.sum(dbias, 0, keep_dims=True)
        tl.store(dbias_ptr + program.to(tl.int64) * H + cols, total, mask=in_row)
