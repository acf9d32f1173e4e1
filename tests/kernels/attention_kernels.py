"""A kernel for the tests alone: which blocks a program of attention visits. The conftest imports it interpreted."""

import triton
import triton.language as tl
from weft.kernels.attention.tiles import visits


@triton.jit
def visited(ranges_ptr, out_ptr, N, phase, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The five numbers of `visits` for each program, int32 [programs, 5]."""
    first = tl.program_id(0) * ROWS
    numbers = visits(ranges_ptr, first, min(first + ROWS, N) - 1, phase, WHOLE, ROWS, COLS)
    for i in tl.static_range(5):
        tl.store(out_ptr + tl.program_id(0) * 5 + i, numbers[i])
