"""Kernels of a mixture of experts, for rows sorted by expert.

offsets are on the device, so each program computes which tiles an expert has. source[i] is token * CHOICES + choice of
sorted row i. The products load the rows of x and grad by token, through pointers, without a sorted copy.
"""

import triton
import triton.language as tl

from ..matmul.kernel import finish, finish_gated, halves, sigmoid, tile_of


@triton.jit
def gated_rows(
    x_ptr, gate_ptr, up_ptr, source_ptr, offsets_ptr,
    out_ptr, z_gate_ptr, z_up_ptr,
    H, I, COUNT, CHOICES,
    stride_xn, stride_xh, stride_ge, stride_gi, stride_gh, stride_on, stride_oi,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [rows, I] = silu(x[token] @ gate[e].T) * (x[token] @ up[e].T) for the sorted rows of expert e < COUNT.

    gate and up [E, I, H] have equal strides. z_gate and z_up: receive the two products, with the strides of out; None
    to store neither.
    """
    tile = tl.program_id(0)
    before = 0
    start = 0
    tiles_m = tl.cdiv(I, TILE_M)
    for e in range(COUNT):
        stop = tl.load(offsets_ptr + e)
        tiles_n = tl.cdiv(stop - start, TILE_N)
        here = tiles_n * tiles_m
        while tile < before + here:
            tile_n, tile_m = tile_of(tile - before, tiles_n, tiles_m, GROUP_N)
            row, col = start + tile_n.to(tl.int64) * TILE_N, tile_m.to(tl.int64) * TILE_M
            rows, cols, inner = row + tl.arange(0, TILE_N), col + tl.arange(0, TILE_M), tl.arange(0, TILE_K)
            tokens = tl.load(source_ptr + rows, mask=rows < stop, other=0).to(tl.int64) // CHOICES
            far = inner.to(tl.int64)
            x_tile = x_ptr + tokens[:, None] * stride_xn + far * stride_xh
            to_weights = tl.cast(e, tl.int64) * stride_ge + far[:, None] * stride_gh + cols * stride_gi
            in_rows, in_cols = (rows < stop)[:, None], cols < I
            gate = tl.zeros([TILE_N, TILE_M], tl.float32)
            up = tl.zeros([TILE_N, TILE_M], tl.float32)
            for k in range(0, H, TILE_K):
                in_k = k + inner < H
                in_weights = in_k[:, None] & in_cols
                left = tl.load(x_tile, mask=in_rows & in_k, other=0.0)
                right = tl.load(gate_ptr + to_weights, mask=in_weights, other=0.0)
                gate = tl.dot(left, right, gate, input_precision=PRECISION)
                right = tl.load(up_ptr + to_weights, mask=in_weights, other=0.0)
                up = tl.dot(left, right, up, input_precision=PRECISION)
                x_tile += tl.cast(TILE_K, tl.int64) * stride_xh
                to_weights += tl.cast(TILE_K, tl.int64) * stride_gh
            finish_gated(
                gate, up, row, col, out_ptr, z_gate_ptr, z_up_ptr, stop, I, stride_on, stride_oi, TILE_N, TILE_M, PARTS
            )
            tile += tl.num_programs(0)
        before += here
        start = stop


@triton.jit
def gated_rows_backward(
    grad_ptr, down_ptr, weights_ptr, source_ptr, offsets_ptr, z_gate_ptr, z_up_ptr,
    hidden_ptr, dgate_ptr, dup_ptr, dweights_ptr,
    H, I, COUNT, CHOICES,
    stride_gn, stride_gh, stride_de, stride_dh, stride_di, stride_zn, stride_wm,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients of both pre-activations [rows, I], from dh = grad[token] @ down[e]; see `finish_backward`.

    weights: [N * CHOICES]. hidden [rows, I] receives weight * h.
    dweights: float32 [tiles of I, rows], for each row the addend of each tile of columns, stride_wm apart.
    """
    tile = tl.program_id(0)
    before = 0
    start = 0
    tiles_m = tl.cdiv(I, TILE_M)
    for e in range(COUNT):
        stop = tl.load(offsets_ptr + e)
        tiles_n = tl.cdiv(stop - start, TILE_N)
        here = tiles_n * tiles_m
        while tile < before + here:
            tile_n, tile_m = tile_of(tile - before, tiles_n, tiles_m, GROUP_N)
            row, col = start + tile_n.to(tl.int64) * TILE_N, tile_m.to(tl.int64) * TILE_M
            rows, cols, inner = row + tl.arange(0, TILE_N), col + tl.arange(0, TILE_M), tl.arange(0, TILE_K)
            source = tl.load(source_ptr + rows, mask=rows < stop, other=0).to(tl.int64)
            far = inner.to(tl.int64)
            grad_tile = grad_ptr + (source // CHOICES)[:, None] * stride_gn + far * stride_gh
            down_tile = down_ptr + tl.cast(e, tl.int64) * stride_de + far[:, None] * stride_dh + cols * stride_di
            in_rows, in_cols = (rows < stop)[:, None], cols < I
            dh = tl.zeros([TILE_N, TILE_M], tl.float32)
            for k in range(0, H, TILE_K):
                in_k = k + inner < H
                left = tl.load(grad_tile, mask=in_rows & in_k, other=0.0)
                right = tl.load(down_tile, mask=in_k[:, None] & in_cols, other=0.0)
                dh = tl.dot(left, right, dh, input_precision=PRECISION)
                grad_tile += tl.cast(TILE_K, tl.int64) * stride_gh
                down_tile += tl.cast(TILE_K, tl.int64) * stride_dh
            weight = tl.load(weights_ptr + source, mask=rows < stop, other=0.0).to(tl.float32)
            dweight = finish_backward(
                dh, weight, row, col, z_gate_ptr, z_up_ptr, hidden_ptr, dgate_ptr, dup_ptr, stop, I, stride_zn,
                TILE_N, TILE_M, PARTS,
            )  # fmt: skip
            tl.store(dweights_ptr + tile_m.to(tl.int64) * stride_wm + rows, dweight, mask=rows < stop)
            tile += tl.num_programs(0)
        before += here
        start = stop


@triton.jit
def finish_backward(
    dh, weight, row, col, z_gate_ptr, z_up_ptr, hidden_ptr, dgate_ptr, dup_ptr, stop, I, stride_zn,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores weight * h and the gradients of z_gate and z_up for the tile at (row, col), in PARTS of columns.

    h = silu(z_gate) * z_up; dh is the gradient of weight * h. All tensors have the strides (stride_zn, 1).
    Returns the sum of dh * h over the tile's columns: addends of the weights' gradient.
    """
    if PARTS > 1:
        left, right = halves(dh, ROWS, COLS)
        dweight = finish_backward(
            left, weight, row, col, z_gate_ptr, z_up_ptr, hidden_ptr, dgate_ptr, dup_ptr, stop, I, stride_zn,
            ROWS, COLS // 2, PARTS // 2,
        )  # fmt: skip
        dweight += finish_backward(
            right, weight, row, col + COLS // 2,
            z_gate_ptr, z_up_ptr, hidden_ptr, dgate_ptr, dup_ptr, stop, I, stride_zn, ROWS, COLS // 2, PARTS // 2,
        )  # fmt: skip
        return dweight
    else:
        rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        inside = (rows < stop)[:, None] & (cols < I)
        at = rows[:, None] * stride_zn + cols
        gate = tl.load(z_gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(z_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        s = sigmoid(gate)
        activation = gate * s
        h = activation * up
        dweight = tl.sum(dh * h, 1)
        dh *= weight[:, None]
        tl.store(hidden_ptr + at, (h * weight[:, None]).to(hidden_ptr.dtype.element_ty), mask=inside)
        tl.store(dup_ptr + at, (dh * activation).to(dup_ptr.dtype.element_ty), mask=inside)
        dgate = dh * up * (s + activation * (1.0 - s))
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        return dweight


@triton.jit
def weights_by_expert(
    a_ptr, x_ptr, source_ptr, offsets_ptr, out_ptr,
    I, H, CHOICES,
    stride_an, stride_xn, stride_xh, stride_oe, stride_oi, stride_oh,
    PRECISION: tl.constexpr,
    TILE_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[e] [I, H] = a[rows].T @ x[tokens of the rows] for the rows of expert e. Grid: experts x tiles of [I, H].

    a: [rows, I] with contiguous rows. x: [N, H].
    """
    tiles_k, tiles_m = tl.cdiv(I, TILE_K), tl.cdiv(H, TILE_M)
    e = tl.program_id(0) // (tiles_k * tiles_m)
    start = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    stop = tl.load(offsets_ptr + e)
    tile_k, tile_m = tile_of(tl.program_id(0) % (tiles_k * tiles_m), tiles_k, tiles_m, GROUP_K)
    down, across = tile_k.to(tl.int64) * TILE_K, tile_m.to(tl.int64) * TILE_M
    total = tl.zeros([TILE_K, TILE_M], tl.float32)
    i, h = down + tl.arange(0, TILE_K), across + tl.arange(0, TILE_M)
    in_i, in_h = (i < I)[:, None], h < H
    for first in range(start, stop, TILE_N):
        rows = tl.cast(first, tl.int64) + tl.arange(0, TILE_N)
        in_expert = rows < stop
        tokens = tl.load(source_ptr + rows, mask=in_expert, other=0).to(tl.int64) // CHOICES
        left = tl.load(a_ptr + i[:, None] + rows * stride_an, mask=in_i & in_expert, other=0.0)
        right = tl.load(x_ptr + tokens[:, None] * stride_xn + h * stride_xh, mask=in_expert[:, None] & in_h, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    finish(
        total, down, across,
        None, None, None, None, out_ptr + tl.cast(e, tl.int64) * stride_oe, None,
        I, H, 0, 0, 0, 0, 0, stride_oi, stride_oh,
        None, None,
        None, None, False, TILE_K, TILE_M, PARTS,
    )  # fmt: skip
