"""A kernel for the tests alone, compiled for its tensor-core instructions."""

import triton
import triton.language as tl
from weft.kernels.launching.aot import Variant


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """c = a @ b for one tile: a is [TILE_M, K], b is [K, TILE_N], both contiguous."""
    rows, cols, inner = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    c = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, K, TILE_K):
        a = tl.load(a_ptr + rows[:, None] * K + k + inner)  # [TILE_M, TILE_K]
        b = tl.load(b_ptr + (k + inner)[:, None] * TILE_N + cols)  # [TILE_K, TILE_N]
        c = tl.dot(a, b, c)
    tl.store(c_ptr + rows[:, None] * TILE_N + cols, c)


PRODUCT = Variant(
    "product/bf16",
    product,
    {"a_ptr": "*bf16:16", "b_ptr": "*bf16:16", "c_ptr": "*fp32:16", "K": "i32:16"},
    {"TILE_M": 128, "TILE_N": 64, "TILE_K": 64},
    warps=4,
)
