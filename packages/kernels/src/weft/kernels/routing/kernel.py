"""Routing kernels: the choice of experts, the router's sums, a counting sort, and tokens sorted by expert and back.

A program of `route`, `route_backward`, `statistics` and `statistics_backward` keeps ROWS rows of E scores in registers.
The sort is `count`, `scan` and `place`, in this order; a program has BLOCK choices. A program of `gather_rows`,
`sum_rows` and `sum_rows_backward` computes a token. No kernel uses atomics: every run gives the same bits.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # a key below the key of every score
NAN_KEY = tl.constexpr(0x7FFFFFFF)  # `ordered_bits` of NaN, above the bits of every number
LEAST_SUM = tl.constexpr(1e-20)  # as in reference.py


@triton.jit
def ordered_bits(values):
    """float32 -> int32 in the same order. -0.0 gives the bits of 0.0; NaN is above all numbers."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(values == 0, 0, bits)
    return tl.where(values != values, NAN_KEY, bits)


@triton.jit
def value_of(keys):
    """The float32 value of an int64 key with `ordered_bits` in the upper 32 bits."""
    bits = (keys >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def route(
    scores_ptr, bias_ptr,
    weights_ptr, experts_ptr,
    N, E, k, stride_sn, groups, members, chosen_groups,
    scale,
    SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORMALIZE: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The k highest scores of each row, as experts, and their weights: `reference.route`.

    GROUPED: a row has `groups` groups of `members` experts, and a group takes MEMBERS columns. A column's key has
    `ordered_bits` of the column's value in the upper 32 bits and E - 1 - expert in the lower: keys are distinct, and
    among equal values the lower expert has the higher key.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < N
    cols = tl.arange(0, GROUPS * MEMBERS)
    if GROUPED:
        expert = (cols // MEMBERS * members + cols % MEMBERS)[None, :]
        exists = ((cols // MEMBERS < groups) & (cols % MEMBERS < members))[None, :]
    else:
        expert = cols[None, :]
        exists = expert < E
    scores = tl.load(scores_ptr + rows[:, None] * stride_sn + expert, mask=exists & in_rows[:, None], other=0.0)
    scores = tl.where(exists, scores.to(tl.float32), -float("inf"))
    if not SIGMOID:
        most = tl.max(scores, 1)[:, None]
        total = tl.sum(tl.exp(scores - most), 1)[:, None]
    adjusts: tl.constexpr = GROUPED or bias_ptr is not None
    values = scores
    if adjusts:
        if SIGMOID:
            values = tl.sigmoid(scores)
        elif not AFTER:
            values = tl.exp(scores - most) / total
        if bias_ptr is not None:
            values += tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    keys = (ordered_bits(values).to(tl.int64) << 32) | (E - 1 - expert).to(tl.int64)
    keys = tl.where(exists, keys, LOWEST)
    if GROUPED:
        by_group = tl.reshape(keys, (ROWS, GROUPS, MEMBERS))
        first = tl.max(by_group, 2)
        second = tl.max(tl.where(by_group == first[:, :, None], LOWEST, by_group), 2)
        sums = value_of(first) + tl.where(second == LOWEST, 0.0, value_of(second))
        group = tl.arange(0, GROUPS)[None, :]
        group_keys = (ordered_bits(sums).to(tl.int64) << 32) | (GROUPS - 1 - group).to(tl.int64)
        group_keys = tl.where(group < groups, group_keys, LOWEST)
        allowed = tl.zeros((ROWS, GROUPS), tl.int32)
        for _ in range(chosen_groups):
            is_highest = group_keys == tl.max(group_keys, 1)[:, None]
            allowed = tl.where(is_highest, 1, allowed)
            group_keys = tl.where(is_highest, LOWEST, group_keys)
        keys = tl.reshape(tl.where(allowed[:, :, None] > 0, by_group, LOWEST), (ROWS, GROUPS * MEMBERS))
    choice = tl.arange(0, BLOCK_K)[None, :]
    experts = tl.zeros((ROWS, BLOCK_K), tl.int32)
    chosen = tl.full((ROWS, BLOCK_K), -float("inf"), tl.float32)
    for j in range(k):
        highest = tl.max(keys, 1)[:, None]
        is_highest = keys == highest
        keys = tl.where(is_highest, LOWEST, keys)
        score = tl.sum(tl.where(is_highest, scores, 0.0), 1)[:, None]
        if adjusts:
            score = tl.where((highest >> 32) == NAN_KEY, float("nan"), score)
        experts = tl.where(choice == j, (E - 1 - (highest & 0xFFFFFFFF)).to(tl.int32), experts)
        chosen = tl.where(choice == j, score, chosen)
    in_tile = (choice < k) & in_rows[:, None]
    if SIGMOID:
        weights = tl.where(choice < k, tl.sigmoid(chosen), 0.0)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, 1)[:, None] + LEAST_SUM)
    elif AFTER or NORMALIZE:
        powers = tl.where(choice < k, tl.exp(chosen - tl.max(chosen, 1)[:, None]), 0.0)
        weights = powers / tl.sum(powers, 1)[:, None]
    else:
        weights = tl.exp(chosen - most) / total
    tl.store(weights_ptr + rows[:, None] * k + choice, weights * scale, mask=in_tile)
    tl.store(experts_ptr + rows[:, None] * k + choice, experts, mask=in_tile)


@triton.jit
def route_backward(
    grad_ptr, scores_ptr, experts_ptr,
    dscores_ptr,
    N, E, k, stride_sn,
    scale,
    SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores: `reference.route_backward`. The k gradients are spread over the row's columns."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < N
    cols = tl.arange(0, BLOCK_E)[None, :]
    in_tile = (cols < E) & in_rows[:, None]
    scores = tl.load(scores_ptr + rows[:, None] * stride_sn + cols, mask=in_tile, other=0.0).to(tl.float32)
    scores = tl.where(cols < E, scores, -float("inf"))
    grads = tl.zeros((ROWS, BLOCK_E), tl.float32)
    is_chosen = tl.zeros((ROWS, BLOCK_E), tl.int32)
    for j in range(k):
        expert = tl.load(experts_ptr + rows * k + j, mask=in_rows, other=0)[:, None]
        grad = tl.load(grad_ptr + rows * k + j, mask=in_rows, other=0.0).to(tl.float32)[:, None] * scale
        grads = tl.where(cols == expert, grad, grads)
        is_chosen = tl.where(cols == expert, 1, is_chosen)
    if SIGMOID:
        weights = tl.where(is_chosen > 0, tl.sigmoid(scores), 0.0)
        if NORMALIZE:
            total = tl.sum(weights, 1)[:, None] + LEAST_SUM
            grads = (grads - tl.sum(grads * weights, 1)[:, None] / total) / total
        dscores = grads * weights * (1 - weights)
    else:
        if AFTER or NORMALIZE:
            scores = tl.where(is_chosen > 0, scores, -float("inf"))
        powers = tl.exp(scores - tl.max(scores, 1)[:, None])
        weights = powers / tl.sum(powers, 1)[:, None]
        dscores = weights * (grads - tl.sum(grads * weights, 1)[:, None])
    tl.store(dscores_ptr + rows[:, None] * E + cols, dscores.to(dscores_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def statistics(
    logits_ptr, experts_ptr,
    addends_ptr,
    N, E, k, stride_ln,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """addends [programs, 2 * E + 1]: for `router_statistics`, the sums of each program over the program's rows."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_E)[None, :]
    counts = tl.zeros((ROWS, BLOCK_E), tl.int32)
    sums = tl.zeros((ROWS, BLOCK_E), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for tile in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        in_rows = rows < N
        in_tile = (cols < E) & in_rows[:, None]
        logits = tl.load(logits_ptr + rows[:, None] * stride_ln + cols, mask=in_tile, other=0.0).to(tl.float32)
        logits = tl.where(cols < E, logits, -float("inf"))
        most = tl.max(logits, 1)
        powers = tl.exp(logits - most[:, None])
        total = tl.sum(powers, 1)
        lse = tl.log(total) + most
        sums += tl.where(in_rows[:, None], powers / total[:, None], 0.0)
        squares += tl.where(in_rows, lse * lse, 0.0)
        for j in range(k):
            expert = tl.load(experts_ptr + rows * k + j, mask=in_rows, other=-1)
            counts += (cols == expert[:, None]).to(tl.int32)
    addends_ptr += program.to(tl.int64) * (2 * E + 1)
    tl.store(addends_ptr + cols, tl.sum(counts, 0)[None, :].to(tl.float32), mask=cols < E)
    tl.store(addends_ptr + E + cols, tl.sum(sums, 0)[None, :], mask=cols < E)
    tl.store(addends_ptr + 2 * E, tl.sum(squares, 0))


@triton.jit
def statistics_backward(
    grad_ptr, logits_ptr,
    dlogits_ptr,
    N, E, stride_ln,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dlogits = p * (g + 2 * z * lse - sum(p * g)) with p the softmax, g = grad[E : 2 * E] and z = grad[2 * E]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_E)[None, :]
    in_tile = (cols < E) & (rows < N)[:, None]
    logits = tl.load(logits_ptr + rows[:, None] * stride_ln + cols, mask=in_tile, other=0.0).to(tl.float32)
    logits = tl.where(cols < E, logits, -float("inf"))
    grad = tl.load(grad_ptr + E + cols, mask=cols < E, other=0.0)
    most = tl.max(logits, 1)[:, None]
    powers = tl.exp(logits - most)
    total = tl.sum(powers, 1)[:, None]
    p = powers / total
    of_tokens = 2 * tl.load(grad_ptr + 2 * E) * (tl.log(total) + most) - tl.sum(p * grad, 1)[:, None]
    dlogits = p * (grad + of_tokens)
    tl.store(dlogits_ptr + rows[:, None] * E + cols, dlogits.to(dlogits_ptr.dtype.element_ty), mask=in_tile)


@triton.jit
def load_ids(experts_ptr, places, R, first, E):
    """The experts of choices, counted from `first`. E: an expert outside `first` to first + E - 1. E + 1: no choice.

    places: the choices to load; a place from R on is no choice.
    """
    ids = tl.load(experts_ptr + places, mask=places < R, other=0).to(tl.int64) - first
    ids = tl.where((ids < 0) | (ids >= E), E, ids)
    return tl.where(places < R, ids, E + 1).to(tl.int32)


@triton.jit
def count(
    experts_ptr,
    counts_ptr,
    R, first, E,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """counts [blocks, E + 1]: how many choices of a block are of each expert, and last, of experts outside."""
    block = tl.program_id(0).to(tl.int64)
    ids = load_ids(experts_ptr, block * BLOCK + tl.arange(0, BLOCK), R, first, E)
    for start in range(0, E + 1, BLOCK_E):
        cols = start + tl.arange(0, BLOCK_E)
        found = tl.sum((ids[:, None] == cols[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + block * (E + 1) + cols, found, mask=cols <= E)


@triton.jit
def scan(
    counts_ptr,
    totals_ptr,
    blocks, E,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Replaces each count by the sum of the counts of the blocks before; totals [E + 1]: the sums over all blocks."""
    cols = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    before = tl.zeros((1, BLOCK_E), tl.int32)
    for start in range(0, blocks, BLOCK_B):
        rows = (start + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
        in_tile = (rows < blocks) & (cols <= E)
        counts = tl.load(counts_ptr + rows * (E + 1) + cols, mask=in_tile, other=0)
        tl.store(counts_ptr + rows * (E + 1) + cols, tl.cumsum(counts, 0) - counts + before, mask=in_tile)
        before += tl.sum(counts, 0)[None, :]
    tl.store(totals_ptr + cols, before, mask=cols <= E)


@triton.jit
def place(
    experts_ptr, before_ptr, totals_ptr, ends_ptr,
    source_ptr, positions_ptr,
    R, first, E,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """source[position] = choice and positions[choice] = position. A choice's position: how many are sorted before.

    before: the counts, replaced by `scan`. totals: from `scan`. ends [E + 1]: the cumulative sums of totals.
    """
    block = tl.program_id(0).to(tl.int64)
    place_in_block = tl.arange(0, BLOCK)
    choices = block * BLOCK + place_in_block
    ids = load_ids(experts_ptr, choices, R, first, E)
    rank = tl.zeros((BLOCK,), tl.int32)  # earlier choices of the same expert, in the block
    for start in range(0, BLOCK, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        earlier = load_ids(experts_ptr, block * BLOCK + columns, R, first, E)
        is_before = (ids[:, None] == earlier[None, :]) & (columns[None, :] < place_in_block[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
    exists = choices < R
    begin = tl.load(ends_ptr + ids, mask=exists, other=0) - tl.load(totals_ptr + ids, mask=exists, other=0)
    position = begin + tl.load(before_ptr + block * (E + 1) + ids, mask=exists, other=0) + rank
    tl.store(source_ptr + position, choices.to(tl.int32), mask=exists)
    tl.store(positions_ptr + choices, position, mask=exists)


@triton.jit
def gather_rows(x_ptr, positions_ptr, rows_ptr, H, k, stride_xn, BLOCK_H: tl.constexpr):
    """rows[positions[token, choice]] = x[token]. A program copies BLOCK_H columns of a token."""
    across = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0).to(tl.int64) // across
    cols = tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H)
    x = tl.load(x_ptr + token * stride_xn + cols, mask=cols < H, other=0.0)
    for j in range(k):
        position = tl.load(positions_ptr + token * k + j).to(tl.int64)
        tl.store(rows_ptr + position * H + cols, x, mask=cols < H)


@triton.jit
def sum_rows(
    y_ptr, positions_ptr, weights_ptr, ends_ptr, output_ptr,
    H, E, k, stride_yn,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """output[token] = the sum of weights[token, j] * y[positions[token, j]], in the order of j.

    weights_ptr: None for weights of 1. ends: where the rows of each of E experts end; rows behind the last expert's add
    nothing. None: all rows count.
    """
    across = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0).to(tl.int64) // across
    cols = tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for j in range(k):
        position = tl.load(positions_ptr + token * k + j).to(tl.int64)
        counts = True
        if ends_ptr is not None:
            counts = position < tl.load(ends_ptr + E - 1)
        y = tl.load(y_ptr + position * stride_yn + cols, mask=(cols < H) & counts, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + token * k + j, mask=counts, other=0.0).to(tl.float32)
        total += y
    tl.store(output_ptr + token * H + cols, total.to(output_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def sum_rows_backward(
    grad_ptr, y_ptr, positions_ptr, weights_ptr,
    dy_ptr, dweights_ptr,
    H, k, stride_gn, stride_yn,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dy[positions[token, j]] = weights[token, j] * grad[token]; dweights[token, j]: the dot product of grad[token] and
    y[positions[token, j]].

    dy or dweights may be None. A token's row of grad is read once.
    """
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_K)
    dots = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        grad = tl.load(grad_ptr + token * stride_gn + cols, mask=cols < H, other=0.0).to(tl.float32)
        for j in range(k):
            position = tl.load(positions_ptr + token * k + j).to(tl.int64)
            if dy_ptr is not None:
                dy = grad * tl.load(weights_ptr + token * k + j).to(tl.float32)
                tl.store(dy_ptr + position * H + cols, dy.to(dy_ptr.dtype.element_ty), mask=cols < H)
            if dweights_ptr is not None:
                y = tl.load(y_ptr + position * stride_yn + cols, mask=cols < H, other=0.0).to(tl.float32)
                dots += tl.where(choice == j, tl.sum(grad * y, 0), 0.0)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + token * k + choice, dots.to(dweights_ptr.dtype.element_ty), mask=choice < k)
