"""Kernels for rope, and for rope after an RMS norm of each head, each in one pass.

A program computes TOKENS tokens by HEADS heads, in two tiles [TOKENS, HEADS, HALF]: the first and the second elements
of each head's pairs. The first D // 2 of HALF exist. Token n uses row n % R of the tables [R, D // 2], which is read
once for all HEADS. The heads of a token are contiguous, with any stride between tokens.
"""

import triton
import triton.language as tl


@triton.jit
def tile(part, N, heads, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Tile number `part`: tokens, int64 [TOKENS, 1, 1], heads [1, HEADS, 1], and the mask of those in range."""
    across = tl.cdiv(heads, HEADS)
    token = (tl.cast(part, tl.int64) // across * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (part % across * HEADS + tl.arange(0, HEADS))[None, :, None]
    return token, head, (token < N) & (head < heads)


@triton.jit
def angles(cos_ptr, sin_ptr, token, N, R, D, HALF: tl.constexpr):
    """Cosines and sines of the tokens: each [TOKENS, 1, HALF] in float32."""
    pair = tl.arange(0, HALF)[None, None, :]
    place, is_there = token % R * (D // 2) + pair, (token < N) & (pair < D // 2)
    cos = tl.load(cos_ptr + place, mask=is_there, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + place, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def load_pairs(x_ptr, start, is_there, D, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """The first and the second elements of the pairs of the heads at offsets `start` [TOKENS, HEADS, 1], in float32."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.load(x_ptr + start + cols, mask=is_there & (cols < D), other=0.0).to(tl.float32)
        first, second = tl.split(x.reshape(x.shape[0], x.shape[1], HALF, 2))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        in_head = is_there & (pair < D // 2)
        first = tl.load(x_ptr + start + pair, mask=in_head, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + start + D // 2 + pair, mask=in_head, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(y_ptr, start, is_there, D, first, second, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Stores the elements of pairs where `load_pairs` would read them."""
    first, second = first.to(y_ptr.dtype.element_ty), second.to(y_ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, None, :]
        y = tl.join(first, second).reshape(first.shape[0], first.shape[1], 2 * HALF)
        tl.store(y_ptr + start + cols, y, mask=is_there & (cols < D))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        in_head = is_there & (pair < D // 2)
        tl.store(y_ptr + start + pair, first, mask=in_head)
        tl.store(y_ptr + start + D // 2 + pair, second, mask=in_head)


@triton.jit
def turn(
    x_ptr, cos_ptr, sin_ptr,
    y_ptr,
    N, heads, D, R, stride_xn,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """y = each pair of x rotated by its angle, or with INVERSE by the negative angle. y is contiguous; x may be y."""
    token, head, is_there = tile(tl.program_id(0), N, heads, TOKENS, HEADS)
    cos, sin = angles(cos_ptr, sin_ptr, token, N, R, D, HALF)
    if INVERSE:
        sin = -sin
    first, second = load_pairs(x_ptr, token * stride_xn + head * D, is_there, D, INTERLEAVED, HALF)
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    store_pairs(y_ptr, (token * heads + head) * D, is_there, D, turned_first, turned_second, INTERLEAVED, HALF)


@triton.jit
def normalize_and_turn(
    x_ptr, weight_ptr, cos_ptr, sin_ptr,
    y_ptr, rrms_ptr,
    N, heads, D, R, stride_xn,
    eps,
    INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """y = `turn` of x * rrms * weight, rounded once; rrms [N, heads] = 1 / the root mean square of each head."""
    token, head, is_there = tile(tl.program_id(0), N, heads, TOKENS, HEADS)
    cos, sin = angles(cos_ptr, sin_ptr, token, N, R, D, HALF)
    first, second = load_pairs(x_ptr, token * stride_xn + head * D, is_there, D, INTERLEAVED, HALF)
    rrms = 1.0 / tl.sqrt(tl.sum(first * first + second * second, 2, keep_dims=True) / D + eps)
    tl.store(rrms_ptr + token * heads + head, rrms, mask=is_there)
    origin = tl.zeros((1, 1, 1), tl.int32)
    weight_first, weight_second = load_pairs(weight_ptr, origin, origin == 0, D, INTERLEAVED, HALF)
    first, second = first * rrms * weight_first, second * rrms * weight_second
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    store_pairs(y_ptr, (token * heads + head) * D, is_there, D, turned_first, turned_second, INTERLEAVED, HALF)


@triton.jit
def normalize_and_turn_backward(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, rrms_ptr,
    dx_ptr, dweight_ptr,
    N, heads, D, R, stride_gn, stride_xn,
    INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """dx and dweight: the gradient rotated by the negative angles, then rms_norm.kernel.backward on each head.

    dweight: [programs, D], each program's addend of the weight's gradient.
    """
    program = tl.program_id(0)
    origin = tl.zeros((1, 1, 1), tl.int32)
    weight_first, weight_second = load_pairs(weight_ptr, origin, origin == 0, D, INTERLEAVED, HALF)
    dweight_first = tl.zeros((TOKENS, HEADS, HALF), tl.float32)
    dweight_second = tl.zeros((TOKENS, HEADS, HALF), tl.float32)
    for part in range(program, tl.cdiv(N, TOKENS) * tl.cdiv(heads, HEADS), tl.num_programs(0)):
        token, head, is_there = tile(part, N, heads, TOKENS, HEADS)
        cos, sin = angles(cos_ptr, sin_ptr, token, N, R, D, HALF)
        turned_first, turned_second = load_pairs(grad_ptr, token * stride_gn + head * D, is_there, D, INTERLEAVED, HALF)
        grad_first = turned_first * cos + turned_second * sin
        grad_second = turned_second * cos - turned_first * sin
        rrms = tl.load(rrms_ptr + token * heads + head, mask=is_there, other=0.0)
        n_first, n_second = load_pairs(x_ptr, token * stride_xn + head * D, is_there, D, INTERLEAVED, HALF)
        n_first, n_second = n_first * rrms, n_second * rrms
        dweight_first += grad_first * n_first
        dweight_second += grad_second * n_second
        grad_first, grad_second = grad_first * weight_first, grad_second * weight_second
        mean = tl.sum(grad_first * n_first + grad_second * n_second, 2, keep_dims=True) / D
        if dx_ptr is not None:
            dx_first, dx_second = rrms * (grad_first - n_first * mean), rrms * (grad_second - n_second * mean)
            store_pairs(dx_ptr, (token * heads + head) * D, is_there, D, dx_first, dx_second, INTERLEAVED, HALF)
    if dweight_ptr is not None:
        first = tl.sum(tl.sum(dweight_first, 0, keep_dims=True), 1, keep_dims=True)
        second = tl.sum(tl.sum(dweight_second, 0, keep_dims=True), 1, keep_dims=True)
        start = origin + program.to(tl.int64) * D
        store_pairs(dweight_ptr, start, origin == 0, D, first, second, INTERLEAVED, HALF)
