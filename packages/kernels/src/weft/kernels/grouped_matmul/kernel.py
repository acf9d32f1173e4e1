"""Products of groups of rows: the groups' ends lie on the device, so each program finds the tiles of each group itself."""

import triton
import triton.language as tl

from ..matmul.epilogue import tile_of


@triton.jit
def rows_by_group(
    a_ptr, b_ptr, offsets_ptr, out_ptr,
    N, K, M, FIRST, COUNT, stride_an, stride_ak, stride_bg, stride_bk, stride_bm, stride_on, stride_om,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    """out [N, M] = a [N, K] @ b[g] [K, M] for the rows of group FIRST + g, of COUNT; other rows are not touched."""
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
            rows = start + tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
            cols = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
            inner = tl.arange(0, TILE_K)
            a_tile = a_ptr + rows[:, None] * stride_an + inner * stride_ak
            b_tile = b_ptr + tl.cast(g, tl.int64) * stride_bg + inner[:, None] * stride_bk + cols * stride_bm
            total = tl.zeros([TILE_N, TILE_M], tl.float32)
            in_rows, in_cols = (rows < stop)[:, None], cols < M
            for k in range(0, K, TILE_K):
                in_k = k + inner < K
                left = tl.load(a_tile, mask=in_rows & in_k, other=0.0)
                right = tl.load(b_tile, mask=in_k[:, None] & in_cols, other=0.0)
                total = tl.dot(left, right, total, input_precision=PRECISION)
                a_tile += tl.cast(TILE_K, tl.int64) * stride_ak
                b_tile += tl.cast(TILE_K, tl.int64) * stride_bk
            at = out_ptr + rows[:, None] * stride_on + cols * stride_om
            tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_rows & in_cols)
            tile += tl.num_programs(0)
        before += here
        start = stop


@triton.jit
def weights_by_group(
    a_ptr, grad_ptr, offsets_ptr, out_ptr,
    K, M, FIRST, stride_an, stride_ak, stride_gn, stride_gm, stride_og, stride_ok, stride_om,
    PRECISION: tl.constexpr,
    TILE_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP_K: tl.constexpr,
):  # fmt: skip
    """out[g] [K, M] = a[rows].T @ grad[rows] for the rows of group FIRST + g. Grid: tiles of [K, M], groups."""
    g = tl.program_id(1)
    start = tl.load(offsets_ptr + FIRST + g - 1, mask=FIRST + g > 0, other=0)
    stop = tl.load(offsets_ptr + FIRST + g)
    tile_k, tile_m = tile_of(tl.program_id(0), tl.cdiv(K, TILE_K), tl.cdiv(M, TILE_M), GROUP_K)
    down, cols = tile_k * TILE_K + tl.arange(0, TILE_K), tile_m * TILE_M + tl.arange(0, TILE_M)
    rows = start.to(tl.int64) + tl.arange(0, TILE_N)
    a_tile = a_ptr + down[:, None].to(tl.int64) * stride_ak + rows * stride_an
    grad_tile = grad_ptr + rows[:, None] * stride_gn + cols.to(tl.int64) * stride_gm
    total = tl.zeros([TILE_K, TILE_M], tl.float32)
    in_k, in_m = (down < K)[:, None], cols < M
    for row in range(start, stop, TILE_N):
        in_group = row + tl.arange(0, TILE_N) < stop
        left = tl.load(a_tile, mask=in_k & in_group, other=0.0)
        right = tl.load(grad_tile, mask=in_group[:, None] & in_m, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        a_tile += tl.cast(TILE_N, tl.int64) * stride_an
        grad_tile += tl.cast(TILE_N, tl.int64) * stride_gn
    at = out_ptr + tl.cast(g, tl.int64) * stride_og + down[:, None].to(tl.int64) * stride_ok + cols * stride_om
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_k & in_m)
