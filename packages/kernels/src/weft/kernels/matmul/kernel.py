"""Kernels for matrix products: persistent programs which load tiles by TMA if memory is aligned, else by pointers.

The functions before the kernels are their epilogues, before a tile is stored: scales, bias, activation, residual,
accumulation. The kernels of `grouped_matmul` and `experts` call the same functions.
"""

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


@triton.jit
def multiplied(left, right, total, PRECISION: tl.constexpr):
    """total + left @ right. Within a tile, Hopper sums 8-bit products in fewer bits than float32; total is float32."""
    if left.dtype.primitive_bitwidth == 8:
        return tl.dot(left, right, total, input_precision=PRECISION, max_num_imprecise_acc=left.shape[1])
    else:
        return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def product(
    a_ptr, b_ptr, up_ptr, bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr, z_ptr, z_up_ptr,
    M, N, K, K_SPLIT,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_biasn, stride_rb, stride_rm, stride_rn, stride_sm, stride_sn, stride_ob, stride_os, stride_om, stride_on,
    alpha, beta,
    DESCRIPTORS: tl.constexpr, A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATE: tl.constexpr, SPECIALIZED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out = epilogue(a @ b) for a [B, M, K] and b [B, K, N]; the epilogue is `finish`. Grid: programs, B, splits of K.

    up_ptr, with the strides of b: out = silu(a @ b) * (a @ up), see `finish_gated`; B is 1, and K is not split.
    z_ptr: None, or memory for the pre-activation, with the strides of out. With up_ptr, for a @ b, and z_up_ptr for
    a @ up.
    K_SPLIT: the length of a split, a multiple of TILE_K; or K. The splits' products are stored stride_os apart.
    DESCRIPTORS: load tiles by TMA. a is contiguous along K where A_BY_ROWS, else along M; b along N where B_BY_ROWS,
    else along K; every other stride is a multiple of 16 bytes.
    """
    batch, split = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    a_ptr += batch * stride_ab
    b_ptr += batch * stride_bb
    out_ptr += batch * stride_ob + split * stride_os
    if z_ptr is not None:
        z_ptr += batch * stride_ob
    if residual_ptr is not None:
        residual_ptr += batch * stride_rb
    first, last = split * K_SPLIT, min(K, (split + 1) * K_SPLIT)
    if DESCRIPTORS:
        if A_BY_ROWS:
            a = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_am, 1], [TILE_M, TILE_K])
        else:
            a = tl.make_tensor_descriptor(a_ptr, [K, M], [stride_ak, 1], [TILE_K, TILE_M])
        if B_BY_ROWS:
            b = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_bk, 1], [TILE_K, TILE_N])
            if up_ptr is not None:
                up = tl.make_tensor_descriptor(up_ptr, [K, N], [stride_bk, 1], [TILE_K, TILE_N])
        else:
            b = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_bn, 1], [TILE_N, TILE_K])
            if up_ptr is not None:
                up = tl.make_tensor_descriptor(up_ptr, [N, K], [stride_bn, 1], [TILE_N, TILE_K])
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=False, warp_specialize=SPECIALIZED
    ):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        total_up = tl.zeros([TILE_M, TILE_N], tl.float32)
        if DESCRIPTORS:
            for k in range(first.to(tl.int32), last.to(tl.int32), TILE_K):
                if A_BY_ROWS:
                    left = a.load([tile_m * TILE_M, k])
                else:
                    left = a.load([k, tile_m * TILE_M]).T
                if B_BY_ROWS:
                    right = b.load([k, tile_n * TILE_N])
                else:
                    right = b.load([tile_n * TILE_N, k]).T
                total = multiplied(left, right, total, PRECISION)
                if up_ptr is not None:
                    if B_BY_ROWS:
                        right = up.load([k, tile_n * TILE_N])
                    else:
                        right = up.load([tile_n * TILE_N, k]).T
                    total_up = multiplied(left, right, total_up, PRECISION)
        else:
            rows = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
            cols = tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
            inner = first + tl.arange(0, TILE_K)
            a_tile = a_ptr + rows[:, None] * stride_am + inner * stride_ak
            to_b = inner[:, None] * stride_bk + cols * stride_bn
            in_rows, in_cols = (rows < M)[:, None], cols < N
            for k in range(first, last, TILE_K):
                in_k = k + tl.arange(0, TILE_K) < last
                left = tl.load(a_tile, mask=in_rows & in_k, other=0.0)
                right = tl.load(b_ptr + to_b, mask=in_k[:, None] & in_cols, other=0.0)
                total = multiplied(left, right, total, PRECISION)
                if up_ptr is not None:
                    right = tl.load(up_ptr + to_b, mask=in_k[:, None] & in_cols, other=0.0)
                    total_up = multiplied(left, right, total_up, PRECISION)
                a_tile += tl.cast(TILE_K, tl.int64) * stride_ak
                to_b += tl.cast(TILE_K, tl.int64) * stride_bk
        row, col = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
        if up_ptr is not None:
            finish_gated(
                total, total_up, row, col, out_ptr, z_ptr, z_up_ptr, M, N, stride_om, stride_on, TILE_M, TILE_N, PARTS
            )
        else:
            finish(
                total, row, col,
                bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr, z_ptr,
                M, N, stride_biasn, stride_rm, stride_rn, stride_sm, stride_sn, stride_om, stride_on,
                alpha, beta,
                ACTIVATION, SLOPE, ACCUMULATE, TILE_M, TILE_N, PARTS,
            )  # fmt: skip


@triton.jit
def combine(
    partial_ptr, bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr, z_ptr,
    M, N, SPLITS,
    stride_ps, stride_pb, stride_pm, stride_biasn, stride_rb, stride_rm, stride_rn, stride_sm, stride_sn,
    stride_ob, stride_om, stride_on,
    alpha, beta,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out = epilogue(sum over the splits' products [SPLITS, B, M, N], in float32 and in order of the splits)."""
    batch = tl.program_id(2).to(tl.int64)
    row, col = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLS
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    inside = (rows < M)[:, None] & (cols < N)
    partial = partial_ptr + batch * stride_pb + rows[:, None] * stride_pm + cols
    total = tl.zeros([ROWS, COLS], tl.float32)
    for _ in range(SPLITS):
        total += tl.load(partial, mask=inside, other=0.0)
        partial += stride_ps
    if z_ptr is not None:
        z_ptr += batch * stride_ob
    if residual_ptr is not None:
        residual_ptr += batch * stride_rb
    finish(
        total, row, col,
        bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, out_ptr + batch * stride_ob, z_ptr,
        M, N, stride_biasn, stride_rm, stride_rn, stride_sm, stride_sn, stride_om, stride_on,
        alpha, beta,
        ACTIVATION, SLOPE, ACCUMULATE, ROWS, COLS, 1,
    )  # fmt: skip
