"""Kernels for products of groups of rows. Offsets are on the device: each program computes which tiles a group has."""

import triton
import triton.language as tl

from ..matmul.kernel import finish, multiplied, tile_of


@triton.jit
def rows_by_group(
    a_ptr, b_ptr, bias_ptr, residual_ptr, a_scale_ptr, b_scale_ptr, offsets_ptr, out_ptr, z_ptr,
    N, K, M, FIRST, COUNT,
    stride_an, stride_ak, stride_bg, stride_bk, stride_bm, stride_biasg, stride_biasm, stride_rn, stride_rm,
    stride_sn, stride_sg, stride_sm, stride_on, stride_om,
    alpha, beta,
    DESCRIPTORS: tl.constexpr, B_BY_ROWS: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [N, M] = epilogue(a [N, K] @ b[g] [K, M]) for the rows of group FIRST + g, g < COUNT.

    offsets: the end row of every group. b, bias and b_scale hold only groups FIRST to FIRST + COUNT - 1, such as one
    rank's experts. In out, the rows of the remaining groups stay unchanged.
    Each program computes every num_programs-th tile, so any grid size is correct.
    The epilogue is `finish`, where alpha, beta and PARTS are explained; alpha or beta of 1 is passed as None. z has the
    strides of out. stride_sn: between a's row scales; stride_sg, stride_sm: between b's group and column scales.
    GROUP_N: passed to `tile_of` as GROUP_M.
    DESCRIPTORS: load tiles by TMA. a is contiguous along K, b along M where B_BY_ROWS and along K elsewhere, and
    every other stride is a multiple of 16 bytes. A tile of a may include rows of the next group; their products are
    not stored.
    """
    if DESCRIPTORS:
        a = tl.make_tensor_descriptor(a_ptr, [N, K], [stride_an, 1], [TILE_N, TILE_K])
        if B_BY_ROWS:
            b = tl.make_tensor_descriptor(b_ptr, [COUNT, K, M], [stride_bg, stride_bk, 1], [1, TILE_K, TILE_M])
        else:
            b = tl.make_tensor_descriptor(b_ptr, [COUNT, M, K], [stride_bg, stride_bm, 1], [1, TILE_M, TILE_K])
    tile = tl.program_id(0)
    before = 0
    tiles_m = tl.cdiv(M, TILE_M)
    start = tl.load(offsets_ptr + FIRST - 1, mask=FIRST > 0, other=0)
    for g in range(COUNT):
        stop = tl.load(offsets_ptr + FIRST + g)
        tiles_n = tl.cdiv(stop - start, TILE_N)
        here = tiles_n * tiles_m
        while tile < before + here:
            tile_n, tile_m = tile_of(tile - before, tiles_n, tiles_m, GROUP_N)
            row, col = start + tile_n.to(tl.int64) * TILE_N, tile_m.to(tl.int64) * TILE_M
            total = tl.zeros([TILE_N, TILE_M], tl.float32)
            if DESCRIPTORS:
                for k in range(0, K, TILE_K):
                    left = a.load([row.to(tl.int32), k])
                    if B_BY_ROWS:
                        right = b.load([g, k, col.to(tl.int32)]).reshape(TILE_K, TILE_M)
                    else:
                        right = b.load([g, col.to(tl.int32), k]).reshape(TILE_M, TILE_K).T
                    total = multiplied(left, right, total, PRECISION)
            else:
                rows, cols, inner = row + tl.arange(0, TILE_N), col + tl.arange(0, TILE_M), tl.arange(0, TILE_K)
                far = inner.to(tl.int64)
                a_tile = a_ptr + rows[:, None] * stride_an + far * stride_ak
                b_tile = b_ptr + tl.cast(g, tl.int64) * stride_bg + far[:, None] * stride_bk + cols * stride_bm
                in_rows, in_cols = (rows < stop)[:, None], cols < M
                for k in range(0, K, TILE_K):
                    in_k = k + inner < K
                    left = tl.load(a_tile, mask=in_rows & in_k, other=0.0)
                    right = tl.load(b_tile, mask=in_k[:, None] & in_cols, other=0.0)
                    total = multiplied(left, right, total, PRECISION)
                    a_tile += tl.cast(TILE_K, tl.int64) * stride_ak
                    b_tile += tl.cast(TILE_K, tl.int64) * stride_bk
            bias_of_group, b_scale_of_group = bias_ptr, b_scale_ptr
            if bias_ptr is not None:
                bias_of_group = bias_ptr + tl.cast(g, tl.int64) * stride_biasg
            if b_scale_ptr is not None:
                b_scale_of_group = b_scale_ptr + tl.cast(g, tl.int64) * stride_sg
            finish(
                total, row, col,
                bias_of_group, residual_ptr, a_scale_ptr, b_scale_of_group, out_ptr, z_ptr,
                stop, M, stride_biasm, stride_rn, stride_rm, stride_sn, stride_sm, stride_on, stride_om,
                alpha, beta,
                ACTIVATION, None, False, TILE_N, TILE_M, PARTS,
            )  # fmt: skip
            tile += tl.num_programs(0)
        before += here
        start = stop


@triton.jit
def weights_by_group(
    a_ptr, grad_ptr, offsets_ptr, out_ptr,
    K, M, FIRST, stride_an, stride_ak, stride_gn, stride_gm, stride_og, stride_ok, stride_om,
    alpha,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, ACCUMULATE: tl.constexpr,
    TILE_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[g] [K, M] = alpha * a[rows].T @ grad[rows] for the rows of group FIRST + g. Grid: tiles of [K, M], groups.

    offsets: the end row of every group. out holds only the groups of the grid. An alpha of 1 is passed as None.
    ACCUMULATE: add to out instead of overwriting it.
    DESCRIPTORS: load tiles by TMA; rows of a and grad are contiguous, at strides of a multiple of 16 bytes. Each
    group has a descriptor of its own rows, so TMA reads zeros behind the group's end.
    """
    g = tl.program_id(1)
    start = tl.load(offsets_ptr + FIRST + g - 1, mask=FIRST + g > 0, other=0)
    stop = tl.load(offsets_ptr + FIRST + g)
    tile_k, tile_m = tile_of(tl.program_id(0), tl.cdiv(K, TILE_K), tl.cdiv(M, TILE_M), GROUP_K)
    down, across = tile_k.to(tl.int64) * TILE_K, tile_m.to(tl.int64) * TILE_M
    total = tl.zeros([TILE_K, TILE_M], tl.float32)
    if DESCRIPTORS:
        count = tl.maximum(stop - start, 1)  # a descriptor needs a row; for an empty group the loop below reads none
        from_a, from_grad = a_ptr + start.to(tl.int64) * stride_an, grad_ptr + start.to(tl.int64) * stride_gn
        a = tl.make_tensor_descriptor(from_a, [count, K], [stride_an, 1], [TILE_N, TILE_K])
        grad = tl.make_tensor_descriptor(from_grad, [count, M], [stride_gn, 1], [TILE_N, TILE_M])
        for row in range(0, stop - start, TILE_N):
            left, right = a.load([row, tile_k * TILE_K]).T, grad.load([row, tile_m * TILE_M])
            total = tl.dot(left, right, total, input_precision=PRECISION)
    else:
        rows = start.to(tl.int64) + tl.arange(0, TILE_N)
        in_k, in_m = (down + tl.arange(0, TILE_K) < K)[:, None], across + tl.arange(0, TILE_M) < M
        a_tile = a_ptr + (down + tl.arange(0, TILE_K))[:, None] * stride_ak + rows * stride_an
        grad_tile = grad_ptr + rows[:, None] * stride_gn + (across + tl.arange(0, TILE_M)) * stride_gm
        for row in range(start, stop, TILE_N):
            in_group = row + tl.arange(0, TILE_N) < stop
            left = tl.load(a_tile, mask=in_k & in_group, other=0.0)
            right = tl.load(grad_tile, mask=in_group[:, None] & in_m, other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            a_tile += tl.cast(TILE_N, tl.int64) * stride_an
            grad_tile += tl.cast(TILE_N, tl.int64) * stride_gn
    finish(
        total, down, across,
        None, None, None, None, out_ptr + tl.cast(g, tl.int64) * stride_og, None,
        K, M, 0, 0, 0, 0, 0, stride_ok, stride_om,
        alpha, None,
        None, None, ACCUMULATE, TILE_K, TILE_M, PARTS,
    )  # fmt: skip
