"""Philox 4x32-10 in Triton, as defined in plain torch by `philox`. `uniform` and `normal` only write, and read nothing.

The kernels of dropout and attention call the functions before them, too.

A part (`philox.Part`) is `rows` runs of N consecutive elements, in three outer dims; R1 and R2 are the sizes of the
last two. Run number r has the index (r // R2 // R1, r // R2 % R1, r % R2) in the outer dims.

A program computes a tile of ROWS runs by LANES * GROUPS lanes: GROUPS Philox blocks of each run, where a block gives
LANES elements, its 4 words or their 8 halves. SHIFTED: runs may start inside a block; the tile then begins up to
LANES - 1 lanes before the run. Indices and offsets are 64-bit. Below, `row` is run numbers, `start` the global index of
the first element of each of these runs, and `first` the first lane of the tile within its runs.
"""

import triton
import triton.language as tl

# sin and cos of |x| <= pi / 4 in float64, within 2**-58: fdlibm, k_sin.c and k_cos.c (Sun Microsystems, 1993).
SIN1 = tl.constexpr(-1.66666666666666324348e-01)
SIN2 = tl.constexpr(8.33333333332248946124e-03)
SIN3 = tl.constexpr(-1.98412698298579493134e-04)
SIN4 = tl.constexpr(2.75573137070700676789e-06)
SIN5 = tl.constexpr(-2.50507602534068634195e-08)
SIN6 = tl.constexpr(1.58969099521155010221e-10)
COS1 = tl.constexpr(4.16666666666666019037e-02)
COS2 = tl.constexpr(-1.38888888888741095749e-03)
COS3 = tl.constexpr(2.48015872894767294178e-05)
COS4 = tl.constexpr(-2.75573143513906633035e-07)
COS5 = tl.constexpr(2.08757232129817482790e-09)
COS6 = tl.constexpr(-1.13596475577881948265e-11)
# pi / 2 = QUARTER + QUARTER_REST; QUARTER has 33 bits, which makes its small multiples exact (e_rem_pio2.c).
QUARTER = tl.constexpr(1.57079632673412561417e00)
QUARTER_REST = tl.constexpr(6.07710050650619224932e-11)
TWO_OVER_PI = tl.constexpr(0.6366197723675814)
TURN = tl.constexpr(6.283185307179586 * 2.0**-32)  # from 32 bits to an angle, rounded as the torch path rounds


@triton.jit
def run_start(row, R1, R2, stride_0, stride_1, stride_2):
    """The offset of run number `row`, by the strides of the outer dims. row: int64, as R1 * R2 can pass 2**31."""
    return (row // R2 // R1) * stride_0 + (row // R2 % R1) * stride_1 + (row % R2) * stride_2


@triton.jit
def tile(N, SHIFTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """(row, first) of this program: its run numbers, int64 [ROWS]; and its first lane, a multiple of LANES."""
    lanes = tl.cast(N, tl.int64) + (LANES - 1 if SHIFTED else 0)  # N may be 2**31 - 1
    across = tl.cdiv(lanes, LANES * GROUPS)
    program = tl.program_id(0).to(tl.int64)
    return program // across * ROWS + tl.arange(0, ROWS), program % across * (LANES * GROUPS)


@triton.jit
def columns(start, first, SHIFTED: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Each lane's index within its run, negative for lanes before the run.

    Returns int64 [ROWS, LANES * GROUPS], or [1, LANES * GROUPS] unless SHIFTED.
    """
    cols = first + tl.arange(0, LANES * GROUPS)[None, :]
    return cols - (start & (LANES - 1))[:, None] if SHIFTED else cols


@triton.jit
def blocks(start, first, key, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The four words of each Philox block in the tile: four tensors, uint32 [ROWS, GROUPS]."""
    shift: tl.constexpr = 2 if LANES == 4 else 3
    counter = ((start + first) >> shift)[:, None] + tl.arange(0, GROUPS)[None, :]
    b0, b1, b2, b3 = tl.randint4x(key, counter)  # Philox 4x32-10 of (counter, key), 64 bits each
    # Versions of Triton document different dtypes for the result; the bits are the same.
    return (
        b0.to(tl.uint32, bitcast=True), b1.to(tl.uint32, bitcast=True),
        b2.to(tl.uint32, bitcast=True), b3.to(tl.uint32, bitcast=True),
    )  # fmt: skip


@triton.jit
def interleave(x0, x1, x2, x3, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Four tensors [ROWS, GROUPS] -> [ROWS, 4 * GROUPS], with the four elements of a block side by side."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(ROWS, 4 * GROUPS)


@triton.jit
def halves(b0, b1, b2, b3, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Four words, uint32 [ROWS, GROUPS] -> their 16-bit halves [ROWS, 8 * GROUPS], the lower half of a word first."""
    block = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return tl.join(block & 0xFFFF, block >> 16).reshape(ROWS, 8 * GROUPS)


@triton.jit
def box_muller(b0, b1):
    """Two standard normal float32 numbers from two 32-bit words; see `philox.as_normal`.

    Computed in float64: the float32 functions of two devices differ by more than 2 ulp, most of all for results near
    0. Sine and cosine are written out: the library's functions reduce angles of any size with arrays in local memory,
    and this angle is below 2 pi. The angle is first rounded as torch rounds, and an explicit fma keeps compilers from
    fusing this rounding away.
    """
    radius = tl.sqrt(-2.0 * tl.log((b0.to(tl.float64) + 1.0) * 2.0**-32))
    angle = b1.to(tl.float64) * TURN
    quarters = tl.floor(angle * TWO_OVER_PI + 0.5)  # 0 to 4
    x = tl.fma(quarters, tl.full(angle.shape, -QUARTER, tl.float64), angle)  # exact
    x = x - quarters * QUARTER_REST  # |x| <= pi / 4
    z = x * x
    sine = x + x * z * (SIN1 + z * (SIN2 + z * (SIN3 + z * (SIN4 + z * (SIN5 + z * SIN6)))))
    cosine = 1.0 - 0.5 * z + z * z * (COS1 + z * (COS2 + z * (COS3 + z * (COS4 + z * (COS5 + z * COS6)))))
    quadrant = quarters.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    of_cosine = tl.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    of_sine = tl.where(quadrant >= 2, -1.0, 1.0)
    first = radius * of_cosine * tl.where(is_odd, sine, cosine)
    second = radius * of_sine * tl.where(is_odd, cosine, sine)
    return first.to(tl.float32), second.to(tl.float32)


# These arguments differ between ranks or calls; specializing on their values would only add compilations.
UNSPECIALIZED = ["rows", "R1", "R2", "offset", "stride_0", "stride_1", "stride_2", "key"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def uniform(
    out_ptr,
    rows, R1, R2, N, offset, stride_0, stride_1, stride_2,
    key,
    SHIFTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out = the upper 24 bits of each word as a float32 0 <= u < 1, rounded to out's dtype. out has contiguous runs."""
    row, first = tile(N, SHIFTED, ROWS, GROUPS, 4)
    start = offset + run_start(row, R1, R2, stride_0, stride_1, stride_2)
    b0, b1, b2, b3 = blocks(start, first, key, GROUPS, 4)
    bits = interleave(b0, b1, b2, b3, ROWS, GROUPS)
    number = (bits >> 8).to(tl.float32) * 2.0**-24
    cols = columns(start, first, SHIFTED, GROUPS, 4)
    in_part = (row < rows)[:, None] & (cols >= 0) & (cols < N)
    tl.store(out_ptr + row[:, None] * N + cols, number.to(out_ptr.dtype.element_ty), mask=in_part)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def normal(
    out_ptr,
    rows, R1, R2, N, offset, stride_0, stride_1, stride_2,
    key, std,
    SHIFTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out = std times standard normal float32 numbers, rounded to out's dtype. out has contiguous runs."""
    row, first = tile(N, SHIFTED, ROWS, GROUPS, 4)
    start = offset + run_start(row, R1, R2, stride_0, stride_1, stride_2)
    b0, b1, b2, b3 = blocks(start, first, key, GROUPS, 4)
    n0, n1 = box_muller(b0, b1)
    n2, n3 = box_muller(b2, b3)
    number = interleave(n0, n1, n2, n3, ROWS, GROUPS) * std
    cols = columns(start, first, SHIFTED, GROUPS, 4)
    in_part = (row < rows)[:, None] & (cols >= 0) & (cols < N)
    tl.store(out_ptr + row[:, None] * N + cols, number.to(out_ptr.dtype.element_ty), mask=in_part)
