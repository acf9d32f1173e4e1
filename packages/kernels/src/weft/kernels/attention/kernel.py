"""Attention's kernels: online softmax in tiles, on the keys each query sees (Dao 2023, "FlashAttention-2").

Rows are a batch of tokens [B, T, heads * D]; the D numbers of a head are contiguous, padded in registers to BLOCK_D.
Query head h reads key head h // (heads // kv_heads). Which keys a query sees are two numbers, `ranges.Ranges`.

A program visits the blocks of `visits`. A block is masked only if some row does not see some column. Scores are in
units of log2: score = scale * LOG2E * (query @ key), or with a softcap, softcap * LOG2E * tanh(scale * ... / softcap).
Sums are float32. Optional arguments (sinks_ptr, softcap, offsets_ptr, ...) are None if not given.
No two programs write the same memory, and each sums in a fixed order.

Dropout: weight (b, h, i, j) is kept where its 16 random bits are `threshold` or more. The op `dropout` draws the same
bits for the element offsets[b] + h * head_stride + place of query i * row_stride + place of key j; see `drop.Drop`.
PHASED: key blocks begin at a multiple of 8 elements, and a Philox block gives the bits of 8 neighbouring keys.
"""

import triton
import triton.language as tl

from .tiles import LN2, LOG2E, bounds_of, capped, keep_mask, load, phase_of, store, tile_offsets, visits


@triton.jit
def forward_block(
    total, row_max, row_sum, q, starts, stops, key_ptr, value_ptr, key_offsets, value_offsets,
    head, first_row, first_col, stop, T, S, stride_ks, stride_vs, scale, softcap,
    drop, query_places_ptr, key_places_ptr,
    MASKED: tl.constexpr, PHASED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """total, row_max and row_sum after another block of keys, from key first_col on.

    drop, here and in backward: what `keep_mask` takes of a program, equal for all blocks; None without dropout.
    """
    cols = first_col + tl.arange(0, BLOCK_S)
    to_block, in_range = tl.cast(first_col, tl.int64), (cols >= 0) & (cols < stop)
    k = load(key_ptr + to_block * stride_ks, key_offsets, in_range, MASKED, HEAD_DIM, BLOCK_D)
    score, _ = capped(tl.dot(q, k.T, input_precision=PRECISION), scale, softcap)
    if MASKED:
        seen = (cols[None, :] >= starts[:, None]) & (cols[None, :] < stops[:, None])
        score = tl.where(seen, score, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    shift = tl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max
    weight = tl.exp2(score - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weight, 1)
    if drop is not None:
        keep = keep_mask(
            drop, query_places_ptr, key_places_ptr, head, first_row, first_col, T, S, PHASED, BLOCK_T, BLOCK_S
        )
        weight = tl.where(keep, weight, 0.0)
    v = load(value_ptr + to_block * stride_vs, value_offsets, in_range, MASKED, HEAD_DIM, BLOCK_D)
    total = tl.dot(weight.to(v.dtype), v, total * rescale[:, None], input_precision=PRECISION)
    return total, new_max, row_sum


# Arguments that differ between calls or ranks are not specialized: one compiled kernel takes all values.
UNSPECIALIZED = [
    "T", "S", "heads", "group", "stride_rb", "stride_qpb", "stride_kpb", "head_stride", "row_stride", "first_query",
    "first_key", "drop_key", "threshold",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward(
    query_ptr, key_ptr, value_ptr, ranges_ptr, sinks_ptr, offsets_ptr, query_places_ptr, key_places_ptr,
    output_ptr, lse_ptr,
    T, S, heads, group,
    stride_qb, stride_qt, stride_kb, stride_ks, stride_vb, stride_vs, stride_rb, stride_qpb, stride_kpb,
    stride_ob, stride_ot, head_stride, row_stride,
    scale, softcap, first_query, first_key, drop_key, threshold, drop_scale,
    PHASED: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """output = softmax(scores) @ value, and lse [B, heads, T], the logsumexp of a row's scores and its sink.

    ranges: `Ranges.keys`. A row that sees nothing gives 0, and without a sink the logsumexp -inf.
    A program computes BLOCK_T queries of a head. Programs with the most keys, under a causal mask, start first.
    """
    row_blocks = tl.cdiv(T, BLOCK_T)
    program = tl.program_id(0)
    first_row = (row_blocks - 1 - program % row_blocks) * BLOCK_T
    head, batch = program // row_blocks % heads, (program // row_blocks // heads).to(tl.int64)
    drop, phase = None, None
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + batch)
        drop = (
            offset, batch * stride_qpb, batch * stride_kpb, head_stride, row_stride,
            first_query, first_key, drop_key, threshold,
        )  # fmt: skip
        if PHASED:
            phase = phase_of(offset, first_key)
    rows, last_row = first_row + tl.arange(0, BLOCK_T), min(first_row + BLOCK_T, T) - 1
    ranges_ptr += batch * stride_rb
    origin, begin, skipped, whole, masked = visits(
        ranges_ptr, first_row, last_row, phase, offsets_ptr is None, BLOCK_T, BLOCK_S
    )
    starts, stops = bounds_of(ranges_ptr, rows, T)
    stop = tl.load(ranges_ptr + 2 * last_row + 1)
    to_row = tl.cast(first_row, tl.int64)
    query_ptr += batch * stride_qb + to_row * stride_qt + head * HEAD_DIM
    q = load(query_ptr, tile_offsets(stride_qt, BLOCK_T, BLOCK_D), rows < T, True, HEAD_DIM, BLOCK_D)
    key_ptr += batch * stride_kb + head // group * HEAD_DIM
    value_ptr += batch * stride_vb + head // group * HEAD_DIM
    key_offsets, value_offsets = (
        tile_offsets(stride_ks, BLOCK_S, BLOCK_D),
        tile_offsets(stride_vs, BLOCK_S, BLOCK_D),
    )
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if sinks_ptr is not None:
        row_max = tl.zeros([BLOCK_T], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        row_sum = tl.full([BLOCK_T], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_T], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_T], tl.float32)
    for block in range(begin, begin + whole):
        total, row_max, row_sum = forward_block(
            total, row_max, row_sum, q, starts, stops, key_ptr, value_ptr, key_offsets, value_offsets,
            head, first_row, origin + block * BLOCK_S, stop, T, S, stride_ks, stride_vs, scale, softcap,
            drop, query_places_ptr, key_places_ptr,
            False, PHASED, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    for number in range(masked):
        block = number + tl.where(number >= begin, skipped, 0)
        total, row_max, row_sum = forward_block(
            total, row_max, row_sum, q, starts, stops, key_ptr, value_ptr, key_offsets, value_offsets,
            head, first_row, origin + block * BLOCK_S, stop, T, S, stride_ks, stride_vs, scale, softcap,
            drop, query_places_ptr, key_places_ptr,
            True, PHASED, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    sees_nothing = row_sum == 0.0
    factor = 1.0 / tl.where(sees_nothing, 1.0, row_sum)
    if offsets_ptr is not None:
        factor *= drop_scale
    output_ptr += batch * stride_ob + to_row * stride_ot + head * HEAD_DIM
    store(output_ptr, tile_offsets(stride_ot, BLOCK_T, BLOCK_D), total * factor[:, None], rows < T, HEAD_DIM, BLOCK_D)
    lse = tl.where(sees_nothing, -float("inf"), (row_max + tl.log2(row_sum)) * LN2)
    tl.store(lse_ptr + (batch * heads + head) * T + rows, lse, mask=rows < T)


@triton.jit
def backward_queries_block(
    total, q, grad, lse, delta, starts, stops, key_ptr, value_ptr, key_offsets, value_offsets,
    head, first_row, first_col, stop, T, S, stride_ks, stride_vs, scale, softcap,
    drop, query_places_ptr, key_places_ptr, drop_scale,
    MASKED: tl.constexpr, PHASED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """total after another block of keys, from key first_col on."""
    cols = first_col + tl.arange(0, BLOCK_S)
    to_block, in_range = tl.cast(first_col, tl.int64), (cols >= 0) & (cols < stop)
    k = load(key_ptr + to_block * stride_ks, key_offsets, in_range, MASKED, HEAD_DIM, BLOCK_D)
    score, slope = capped(tl.dot(q, k.T, input_precision=PRECISION), scale, softcap)
    weight = tl.exp2(score - lse[:, None])
    if MASKED:
        seen = (cols[None, :] >= starts[:, None]) & (cols[None, :] < stops[:, None])
        weight = tl.where(seen, weight, 0.0)
    v = load(value_ptr + to_block * stride_vs, value_offsets, in_range, MASKED, HEAD_DIM, BLOCK_D)
    dweight = tl.dot(grad, v.T, input_precision=PRECISION)
    if drop is not None:
        keep = keep_mask(
            drop, query_places_ptr, key_places_ptr, head, first_row, first_col, T, S, PHASED, BLOCK_T, BLOCK_S
        )
        dweight = tl.where(keep, dweight * drop_scale, 0.0)
    dscore = weight * (dweight - delta[:, None])
    if softcap is not None:
        dscore *= slope
    return tl.dot(dscore.to(k.dtype), k, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_queries(
    grad_ptr, query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, grad_lse_ptr, ranges_ptr,
    offsets_ptr, query_places_ptr, key_places_ptr,
    dquery_ptr, delta_ptr,
    T, S, heads, group,
    stride_gb, stride_gt, stride_qb, stride_qt, stride_kb, stride_ks, stride_vb, stride_vs, stride_ob, stride_ot,
    stride_rb, stride_qpb, stride_kpb, stride_dqb, stride_dqt, head_stride, row_stride,
    scale, softcap, first_query, first_key, drop_key, threshold, drop_scale,
    PHASED: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dquery, and delta [B, heads, T] = rowsum(grad * output) - grad_lse, which `backward_keys` reads.

    With weight = exp(score - lse): dscore = weight * (grad @ value - delta). Programs and ranges as in `forward`.
    """
    row_blocks = tl.cdiv(T, BLOCK_T)
    program = tl.program_id(0)
    first_row = (row_blocks - 1 - program % row_blocks) * BLOCK_T
    head, batch = program // row_blocks % heads, (program // row_blocks // heads).to(tl.int64)
    drop, phase = None, None
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + batch)
        drop = (
            offset, batch * stride_qpb, batch * stride_kpb, head_stride, row_stride,
            first_query, first_key, drop_key, threshold,
        )  # fmt: skip
        if PHASED:
            phase = phase_of(offset, first_key)
    rows, last_row = first_row + tl.arange(0, BLOCK_T), min(first_row + BLOCK_T, T) - 1
    in_rows, to_row = rows < T, tl.cast(first_row, tl.int64)
    grad_ptr += batch * stride_gb + to_row * stride_gt + head * HEAD_DIM
    output_ptr += batch * stride_ob + to_row * stride_ot + head * HEAD_DIM
    grad = load(grad_ptr, tile_offsets(stride_gt, BLOCK_T, BLOCK_D), in_rows, True, HEAD_DIM, BLOCK_D)
    output = load(output_ptr, tile_offsets(stride_ot, BLOCK_T, BLOCK_D), in_rows, True, HEAD_DIM, BLOCK_D)
    delta = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
    to_rows = (batch * heads + head) * T + rows
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + to_rows, mask=in_rows, other=0.0)
    tl.store(delta_ptr + to_rows, delta, mask=in_rows)
    lse = tl.load(lse_ptr + to_rows, mask=in_rows, other=0.0) * LOG2E
    query_ptr += batch * stride_qb + to_row * stride_qt + head * HEAD_DIM
    q = load(query_ptr, tile_offsets(stride_qt, BLOCK_T, BLOCK_D), in_rows, True, HEAD_DIM, BLOCK_D)
    ranges_ptr += batch * stride_rb
    origin, begin, skipped, whole, masked = visits(
        ranges_ptr, first_row, last_row, phase, offsets_ptr is None, BLOCK_T, BLOCK_S
    )
    starts, stops = bounds_of(ranges_ptr, rows, T)
    stop = tl.load(ranges_ptr + 2 * last_row + 1)
    key_ptr += batch * stride_kb + head // group * HEAD_DIM
    value_ptr += batch * stride_vb + head // group * HEAD_DIM
    key_offsets = tile_offsets(stride_ks, BLOCK_S, BLOCK_D)
    value_offsets = tile_offsets(stride_vs, BLOCK_S, BLOCK_D)
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for block in range(begin, begin + whole):
        total = backward_queries_block(
            total, q, grad, lse, delta, starts, stops, key_ptr, value_ptr, key_offsets, value_offsets,
            head, first_row, origin + block * BLOCK_S, stop, T, S, stride_ks, stride_vs, scale, softcap,
            drop, query_places_ptr, key_places_ptr, drop_scale,
            False, PHASED, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    for number in range(masked):
        block = number + tl.where(number >= begin, skipped, 0)
        total = backward_queries_block(
            total, q, grad, lse, delta, starts, stops, key_ptr, value_ptr, key_offsets, value_offsets,
            head, first_row, origin + block * BLOCK_S, stop, T, S, stride_ks, stride_vs, scale, softcap,
            drop, query_places_ptr, key_places_ptr, drop_scale,
            True, PHASED, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    dquery_ptr += batch * stride_dqb + to_row * stride_dqt + head * HEAD_DIM
    store(dquery_ptr, tile_offsets(stride_dqt, BLOCK_T, BLOCK_D), total * scale, in_rows, HEAD_DIM, BLOCK_D)


@triton.jit
def backward_keys_block(
    dk, dv, k, v, firsts, lasts, query_ptr, grad_ptr, lse_ptr, delta_ptr, query_offsets, grad_offsets,
    head, first_row, first_col, stop, T, S, stride_qt, stride_gt, scale, softcap,
    drop, query_places_ptr, key_places_ptr, drop_scale,
    MASKED: tl.constexpr, PHASED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dk and dv after another block of a head's queries, from query first_row on. Scores are [keys, queries].

    The order keeps registers free: dv's product comes before the product of grad, and delta is loaded last.
    """
    rows = first_row + tl.arange(0, BLOCK_T)
    to_block, in_range = tl.cast(first_row, tl.int64), rows < stop
    to_rows = tl.cast(head, tl.int64) * T + rows
    if MASKED:
        lse = tl.load(lse_ptr + to_rows, mask=in_range, other=0.0) * LOG2E
    else:
        lse = tl.load(lse_ptr + to_rows) * LOG2E
    q_ptr = query_ptr + to_block * stride_qt + head * HEAD_DIM
    q = load(q_ptr, query_offsets, in_range, MASKED, HEAD_DIM, BLOCK_D)
    score, slope = capped(tl.dot(k, q.T, input_precision=PRECISION), scale, softcap)
    weight = tl.exp2(score - lse[None, :])
    if MASKED:
        seen = (rows[None, :] >= firsts[:, None]) & (rows[None, :] < lasts[:, None])
        weight = tl.where(seen, weight, 0.0)
    g_ptr = grad_ptr + to_block * stride_gt + head * HEAD_DIM
    grad = load(g_ptr, grad_offsets, in_range, MASKED, HEAD_DIM, BLOCK_D)
    dropped_weight = weight
    if drop is not None:
        keep = keep_mask(
            drop, query_places_ptr, key_places_ptr, head, first_row, first_col, T, S, PHASED, BLOCK_T, BLOCK_S
        ).T
        dropped_weight = tl.where(keep, weight, 0.0)
    dv = tl.dot(dropped_weight.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dweight = tl.dot(v, grad.T, input_precision=PRECISION)
    if drop is not None:
        dweight = tl.where(keep, dweight * drop_scale, 0.0)
    if MASKED:
        delta = tl.load(delta_ptr + to_rows, mask=in_range, other=0.0)
    else:
        delta = tl.load(delta_ptr + to_rows)
    dscore = weight * (dweight - delta[None, :])
    if softcap is not None:
        dscore *= slope
    dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_keys(
    grad_ptr, query_ptr, key_ptr, value_ptr, lse_ptr, delta_ptr, ranges_ptr,
    offsets_ptr, query_places_ptr, key_places_ptr,
    dkey_ptr, dvalue_ptr,
    T, S, heads, group,
    stride_gb, stride_gt, stride_qb, stride_qt, stride_kb, stride_ks, stride_vb, stride_vs,
    stride_rb, stride_qpb, stride_kpb, stride_dkb, stride_dks, head_stride, row_stride,
    scale, softcap, first_query, first_key, drop_key, threshold, drop_scale,
    PHASED: tl.constexpr, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dkey and dvalue, which have the same strides. ranges: `Ranges.queries`.

    A program computes BLOCK_S keys of a key head, and sums over the group's query heads in order.
    """
    col_blocks = tl.cdiv(S + 7 if PHASED else S, BLOCK_S)
    program = tl.program_id(0)
    kv_heads = heads // group
    kv_head, batch = program // col_blocks % kv_heads, (program // col_blocks // kv_heads).to(tl.int64)
    drop, phase = None, None
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + batch)
        drop = (
            offset, batch * stride_qpb, batch * stride_kpb, head_stride, row_stride,
            first_query, first_key, drop_key, threshold,
        )  # fmt: skip
        if PHASED:
            phase = phase_of(offset, first_key)
    first_col = program % col_blocks * BLOCK_S
    if phase is not None:
        first_col -= phase
        if first_col >= S:
            return
    cols = first_col + tl.arange(0, BLOCK_S)
    in_cols, to_col = (cols >= 0) & (cols < S), tl.cast(first_col, tl.int64)
    first_seen, last_seen = max(first_col, 0), min(first_col + BLOCK_S, S) - 1
    ranges_ptr += batch * stride_rb
    origin, begin, skipped, whole, masked = visits(
        ranges_ptr, first_seen, last_seen, None, offsets_ptr is None, BLOCK_S, BLOCK_T
    )
    firsts = tl.load(ranges_ptr + 2 * cols, mask=in_cols, other=0)
    lasts = tl.load(ranges_ptr + 2 * cols + 1, mask=in_cols, other=0)
    stop = tl.load(ranges_ptr + 2 * last_seen + 1)
    key_ptr += batch * stride_kb + to_col * stride_ks + kv_head * HEAD_DIM
    value_ptr += batch * stride_vb + to_col * stride_vs + kv_head * HEAD_DIM
    k = load(key_ptr, tile_offsets(stride_ks, BLOCK_S, BLOCK_D), in_cols, True, HEAD_DIM, BLOCK_D)
    v = load(value_ptr, tile_offsets(stride_vs, BLOCK_S, BLOCK_D), in_cols, True, HEAD_DIM, BLOCK_D)
    query_ptr += batch * stride_qb
    grad_ptr += batch * stride_gb
    lse_ptr += batch * heads * T
    delta_ptr += batch * heads * T
    query_offsets = tile_offsets(stride_qt, BLOCK_T, BLOCK_D)
    grad_offsets = tile_offsets(stride_gt, BLOCK_T, BLOCK_D)
    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for number in range(group * whole):
        head, block = kv_head * group + number // whole, begin + number % whole
        dk, dv = backward_keys_block(
            dk, dv, k, v, firsts, lasts, query_ptr, grad_ptr, lse_ptr, delta_ptr, query_offsets, grad_offsets,
            head, origin + block * BLOCK_T, first_col, stop, T, S, stride_qt, stride_gt, scale, softcap,
            drop, query_places_ptr, key_places_ptr, drop_scale,
            False, PHASED, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    for number in range(group * masked):
        head, block = kv_head * group + number // masked, number % masked
        block += tl.where(block >= begin, skipped, 0)
        dk, dv = backward_keys_block(
            dk, dv, k, v, firsts, lasts, query_ptr, grad_ptr, lse_ptr, delta_ptr, query_offsets, grad_offsets,
            head, origin + block * BLOCK_T, first_col, stop, T, S, stride_qt, stride_gt, scale, softcap,
            drop, query_places_ptr, key_places_ptr, drop_scale,
            True, PHASED, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    if offsets_ptr is not None:
        dv *= drop_scale
    to_tile = batch * stride_dkb + to_col * stride_dks + kv_head * HEAD_DIM
    offsets = tile_offsets(stride_dks, BLOCK_S, BLOCK_D)
    store(dkey_ptr + to_tile, offsets, dk * scale, in_cols, HEAD_DIM, BLOCK_D)
    store(dvalue_ptr + to_tile, offsets, dv, in_cols, HEAD_DIM, BLOCK_D)
