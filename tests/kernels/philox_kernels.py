"""Kernels for the tests alone, which show the parts of the kernels of `weft.kernels.random`.

The conftest imports them where kernels are interpreted.
"""

import triton
import triton.language as tl
from weft.kernels.random.kernel import blocks, box_muller, columns, interleave, run_start, tile


@triton.jit(do_not_specialize=["key", "c0", "c1", "c2", "c3"])
def philox_words(out_ptr, key, c0, c1, c2, c3):
    """The four words of a block, by the function that draws in the kernels."""
    counter = tl.zeros([1], tl.int32)
    words = tl.philox(key, counter + c0, counter + c1, counter + c2, counter + c3)
    for lane in tl.static_range(4):
        tl.store(out_ptr + lane + tl.arange(0, 1), words[lane].to(tl.uint32, bitcast=True).to(tl.int64))


@triton.jit(do_not_specialize=["rows", "R1", "R2", "offset", "stride_0", "stride_1", "stride_2", "key"])
def bits(
    out_ptr,
    rows, R1, R2, N, offset, stride_0, stride_1, stride_2,
    key,
    SHIFTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The 32 bits of each element, int64."""
    row, first = tile(N, SHIFTED, ROWS, GROUPS, 4)
    start = offset + run_start(row, R1, R2, stride_0, stride_1, stride_2)
    b0, b1, b2, b3 = blocks(start, first, key, GROUPS, 4)
    cols = columns(start, first, SHIFTED, GROUPS, 4)
    in_part = (row < rows)[:, None] & (cols >= 0) & (cols < N)
    tl.store(out_ptr + row[:, None] * N + cols, interleave(b0, b1, b2, b3, ROWS, GROUPS).to(tl.int64), mask=in_part)


@triton.jit
def tiles(out_ptr, N, SHIFTED: tl.constexpr, GROUPS: tl.constexpr):
    """The first run and the first lane of each program's tile: int64 [programs, 2]."""
    row, first = tile(N, SHIFTED, 1, GROUPS, 4)
    program = tl.program_id(0)
    tl.store(out_ptr + 2 * program + tl.arange(0, 1), row)
    tl.store(out_ptr + 2 * program + 1, first)


@triton.jit
def run_starts(row_ptr, out_ptr, R1, R2, stride_0, stride_1, stride_2, COUNT: tl.constexpr):
    """The offset of each of COUNT runs, int64."""
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, run_start(tl.load(row_ptr + i), R1, R2, stride_0, stride_1, stride_2))


@triton.jit
def pairs(bits_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Box and Muller's numbers of pairs of words: int64 [N, 2] -> float32 [N, 2]."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = pair < N
    b0 = tl.load(bits_ptr + 2 * pair, mask=in_range, other=0).to(tl.uint32)
    b1 = tl.load(bits_ptr + 2 * pair + 1, mask=in_range, other=0).to(tl.uint32)
    n0, n1 = box_muller(b0, b1)
    tl.store(out_ptr + 2 * pair, n0, mask=in_range)
    tl.store(out_ptr + 2 * pair + 1, n1, mask=in_range)
