"""Epilogues of the product kernels, before a tile is stored: scales, bias, activation, residual, accumulation."""

import triton
import triton.language as tl


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The row and column of tile number `tile`.

    Tiles are numbered down GROUP_M rows before the next column: programs which run together share panels in the L2.
    """
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    return first + tile % in_group % rows, tile % in_group // rows


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of z, in float32. gelu_tanh is z * sigmoid(2 * u), which equals z * (1 + tanh(u)) / 2."""
    if ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))  # 1 / sqrt(2)
    elif ACTIVATION == "gelu_tanh":
        z = z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))  # 2 sqrt(2 / pi)
    elif ACTIVATION == "silu":
        z = z * sigmoid(z)
    elif ACTIVATION == "relu":
        z = tl.where(z > 0.0, z, tl.where(z == z, 0.0, z))  # NaN stays NaN, as in torch
    elif ACTIVATION == "relu2":
        positive = tl.where(z > 0.0, z, tl.where(z == z, 0.0, z))
        z = positive * positive
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The derivative of the activation at z, in float32."""
    if ACTIVATION == "gelu":
        # Constants: 1 / sqrt(2), and 1 / sqrt(2 pi).
        derivative = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        derivative = s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif ACTIVATION == "silu":
        s = sigmoid(z)
        derivative = s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "relu":
        derivative = tl.where(z > 0.0, 1.0, 0.0)
    else:
        derivative = tl.where(z > 0.0, 2.0 * z, 0.0)  # relu2
    return derivative


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """x [ROWS, COLS] -> its left and right halves, each [ROWS, COLS // 2]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def finish(
    product, row, col,
    bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr, z_ptr,
    M, N, stride_biasn, stride_rm, stride_rn, stride_sm, stride_sn, stride_om, stride_on,
    alpha, beta,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to the tile `product` [ROWS, COLS] at (row, col), and stores it.

    z = alpha * product * scales + bias; stored to z_ptr, unless None, with the strides of out.
    out = act(z) + beta * residual. With ACCUMULATE: out += act(z) + beta * residual. With SLOPE, the name of an
    activation f: out = z * f'(residual).
    PARTS: the tile is computed in this many parts in turn, to keep fewer registers alive. row, col: int64.
    """
    if PARTS > 1:
        left, right = halves(product, ROWS, COLS)
        finish(
            left, row, col,
            bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr, z_ptr,
            M, N, stride_biasn, stride_rm, stride_rn, stride_sm, stride_sn, stride_om, stride_on,
            alpha, beta,
            ACTIVATION, SLOPE, ACCUMULATE, ROWS, COLS // 2, PARTS // 2,
        )  # fmt: skip
        finish(
            right, row, col + COLS // 2,
            bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr, z_ptr,
            M, N, stride_biasn, stride_rm, stride_rn, stride_sm, stride_sn, stride_om, stride_on,
            alpha, beta,
            ACTIVATION, SLOPE, ACCUMULATE, ROWS, COLS // 2, PARTS // 2,
        )  # fmt: skip
    else:
        rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        in_rows, in_cols = rows < M, cols < N
        inside = in_rows[:, None] & in_cols
        z = product
        if a_scale_ptr is not None:
            z *= tl.load(a_scale_ptr + rows * stride_sm, mask=in_rows, other=0.0)[:, None]
        if b_scale_ptr is not None:
            z *= tl.load(b_scale_ptr + cols * stride_sn, mask=in_cols, other=0.0)
        if alpha is not None:
            z *= alpha
        if bias_ptr is not None:
            z += tl.load(bias_ptr + cols * stride_biasn, mask=in_cols, other=0.0).to(tl.float32)
        at = rows[:, None] * stride_om + cols * stride_on
        if z_ptr is not None:
            tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=inside)
        out = activate(z, ACTIVATION)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + rows[:, None] * stride_rm + cols * stride_rn, mask=inside, other=0.0)
            residual = residual.to(tl.float32)
            if SLOPE is not None:
                out *= slope(residual, SLOPE)
            else:
                out += residual if beta is None else beta * residual
        if ACCUMULATE:
            out += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish_gated(
    gate, up, row, col, out_ptr, gate_ptr, up_ptr, M, N, stride_om, stride_on,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores the tile out = silu(gate) * up at (row, col), in PARTS as in `finish`.

    gate and up are also stored, to gate_ptr and up_ptr with the strides of out, unless gate_ptr is None.
    """
    if PARTS > 1:
        left, right = halves(gate, ROWS, COLS)
        left_up, right_up = halves(up, ROWS, COLS)
        finish_gated(
            left, left_up, row, col, out_ptr, gate_ptr, up_ptr, M, N, stride_om, stride_on, ROWS, COLS // 2, PARTS // 2
        )
        finish_gated(
            right, right_up, row, col + COLS // 2,
            out_ptr, gate_ptr, up_ptr, M, N, stride_om, stride_on, ROWS, COLS // 2, PARTS // 2,
        )  # fmt: skip
    else:
        rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        inside = (rows < M)[:, None] & (cols < N)
        at = rows[:, None] * stride_om + cols * stride_on
        if gate_ptr is not None:
            tl.store(gate_ptr + at, gate.to(gate_ptr.dtype.element_ty), mask=inside)
            tl.store(up_ptr + at, up.to(up_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + at, (activate(gate, "silu") * up).to(out_ptr.dtype.element_ty), mask=inside)
