"""Parts of the attention kernels: which blocks a program visits, tiles of a head, scores, and dropout's mask."""

import triton
import triton.language as tl

from ..cross_entropy.row import tanh
from ..random.kernel import blocks, halves

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def visits(ranges_ptr, first, last, phase, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The blocks of COLS columns that a program visits, for its rows `first` to `last` (at most ROWS).

    Block b has the columns origin + b * COLS to origin + (b + 1) * COLS.
    Returns origin, begin, skipped, whole, masked. Blocks begin to begin + whole need no mask: all rows see every
    column (without WHOLE there are none). Further `masked` blocks need a mask: number i of 0 to masked - 1 is block i
    if i < begin, otherwise block i + skipped.
    ranges_ptr: neither number of a row decreases from row to row.
    phase: blocks begin where (column + phase) % 8 == 0; None: anywhere.
    """
    origin, stop = tl.load(ranges_ptr + 2 * first), tl.load(ranges_ptr + 2 * last + 1)
    whole_start, whole_stop = tl.load(ranges_ptr + 2 * last), tl.load(ranges_ptr + 2 * first + 1)
    count = tl.cdiv(stop - origin, COLS)
    if phase is not None:
        origin -= (origin + phase) & 7
        count = tl.where(count > 0, tl.cdiv(stop - origin, COLS), 0)
    begin, whole = 0, 0
    if WHOLE:
        begin = tl.cdiv(whole_start - origin, COLS)
        whole = max((whole_stop - origin) // COLS - begin, 0)
    skipped = whole
    if whole == 0:  # then there may be columns between those of two rows, as between two runs of queries in a window
        row = first + tl.arange(0, ROWS)
        ends = tl.load(ranges_ptr + 2 * row + 1, mask=row < last, other=0)
        gap = tl.load(ranges_ptr + 2 * row + 2, mask=row < last, other=0) - ends
        widest = tl.max(gap, 0)
        gap_start = tl.min(tl.where(gap == widest, ends, stop), 0)
        begin = tl.cdiv(max(gap_start - origin, 0), COLS)
        skipped = max((gap_start + widest - origin) // COLS - begin, 0)
    return origin, begin, skipped, whole, count - skipped


@triton.jit
def bounds_of(ranges_ptr, rows, N):
    """The first column that each row sees, and the column after the last. Rows from N on see nothing."""
    start = tl.load(ranges_ptr + 2 * rows, mask=rows < N, other=0)
    return start, tl.load(ranges_ptr + 2 * rows + 1, mask=rows < N, other=0)


@triton.jit
def load(ptr, offsets, in_range, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads a tile [rows, BLOCK_D] of a head. in_range: which rows exist; not read unless MASKED."""
    if MASKED:
        mask = in_range[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        return tl.load(ptr + offsets, mask=mask, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(ptr + offsets, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptr + offsets)


@triton.jit
def store(ptr, offsets, tile, in_range, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores the rows that exist of a tile [rows, BLOCK_D], rounded to the dtype in memory."""
    mask = in_range[:, None]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def tile_offsets(stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets within a tile of consecutive rows, int64 [ROWS, BLOCK_D]: ROWS * stride may pass 2**31."""
    return tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def capped(product, scale, softcap):
    """The score in units of log2, and the score's derivative by scale * product, which is 1 without a softcap."""
    if softcap is None:
        return product * (scale * LOG2E), 1.0
    else:
        u = product * (scale / softcap)
        bounded, slope = tanh(u, tl.exp2(tl.abs(u) * (-2.0 * LOG2E)))
        return bounded * (softcap * LOG2E), slope


@triton.jit
def keep_mask(
    drop, query_places_ptr, key_places_ptr, head, first_row, first_col, T, S,
    PHASED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Which weights dropout keeps, of the queries from first_row and keys from first_col: bool [ROWS, COLS].

    drop: the offset of the batch's weights, where the batch's places begin, and the launch's numbers. Pointers to
    places are not in this tuple, because Triton 3.6 takes no None in a tuple.
    """
    offset, query_start, key_start, head_stride, row_stride, first_query, first_key, drop_key, threshold = drop
    rows, cols = first_row + tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
    if query_places_ptr is not None:
        place = tl.load(query_places_ptr + query_start + rows, mask=rows < T, other=0).to(tl.int64)
    else:
        place = first_query + rows.to(tl.int64)
    start = offset + head.to(tl.int64) * head_stride + place * row_stride
    if PHASED:
        b0, b1, b2, b3 = blocks(start, tl.cast(first_col, tl.int64) + first_key, drop_key, COLS // 8, 8)
        bits = halves(b0, b1, b2, b3, ROWS, COLS // 8)
    else:
        if key_places_ptr is not None:
            key_place = tl.load(key_places_ptr + key_start + cols, mask=(cols >= 0) & (cols < S), other=0).to(tl.int64)
        else:
            key_place = first_key + cols.to(tl.int64)
        index = start[:, None] + key_place[None, :]
        b0, b1, b2, b3 = tl.randint4x(drop_key, index >> 3)
        lane = index & 7
        word = tl.where(lane < 4, tl.where(lane < 2, b0, b1), tl.where(lane < 6, b2, b3)).to(tl.uint32, bitcast=True)
        bits = tl.where((lane & 1) == 0, word & 0xFFFF, word >> 16)
    return bits >= threshold.to(tl.uint32)


@triton.jit
def phase_of(offset, first_key):
    """The argument `phase` of `visits` for PHASED dropout, where head_stride and row_stride are multiples of 8."""
    return (((offset & 7) + first_key) & 7).to(tl.int32)
