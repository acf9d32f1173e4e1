"""Attention on a CPU: torch's fused attention, stretch of queries after stretch.

A stretch is a run of neighbouring queries of one of three kinds: all queries see the same keys, or each query sees a
key more than the query before (causal), or each query's keys are a window which moves on by a key. A packed row has a
stretch for each document, and the work grows with the sum of the squares of the documents' lengths. Nothing of T x S is
in memory.

torch's fused attention also returns each row's logsumexp. The backward takes a logsumexp, and computes the attention
weights as exp(score - logsumexp). A row's keys can therefore be split over several calls: the outputs are merged by
logsumexp, and in backward every call gets the merged output and the merged logsumexp (Dao 2023, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# The kinds of stretches, as numbers: 3 * a + b, where from query to query the first key moves by a keys, and the key
# after the last by b keys.
SAME_KEYS, ONE_MORE_KEY, NEXT_WINDOW = 0, 1, 4
# With a window of w keys, a call computes blocks of w / 8 queries, within these bounds. A block of n queries computes
# n + w - 1 scores a query, of which w are seen, and small blocks make small products. Fastest of 32 to 512 for windows
# of 64, 256, 1,024 and 4,096 keys, 8 heads of 64 in float32, on a single thread of an AMD EPYC.
LEAST_BLOCK, MOST_BLOCK = 64, 192
SMALL = 2**13  # scores of a row and head for which a call with a mask takes no longer than two calls without


class _Stretch(NamedTuple):
    """Neighbouring queries whose keys move alike from query to query."""

    first: int  # the first query
    stop: int  # the query after the last
    kind: int  # SAME_KEYS, ONE_MORE_KEY or NEXT_WINDOW; any of the three for a single query
    start: int  # the first key the first query sees
    end: int  # the key after the last key the first query sees
    last_end: int  # the key after the last key the last query sees


class FusedCall(NamedTuple):
    """One call of torch's fused attention: neighbouring queries and neighbouring keys."""

    queries: slice
    keys: slice
    causal: bool = False  # whether query i of the call sees only the keys 0 to i of the call
    mask: Tensor | None = None  # added to the scores: -inf where a query does not see a key of the call
    merges: bool = False  # whether to merge with the output of the call before, for the same queries and earlier keys


CallsByRows = list[tuple[slice, list[FusedCall]]]  # for each slice of the batch's rows: the calls for these rows
FusedCalls = FusedCall | CallsByRows  # a single call computes all queries and all keys of all rows


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: FusedCalls,
    sinks: Tensor | None,
    *,
    head_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """query [B, T, heads * D], key and value [B, S, kv_heads * D] -> output [B, T, heads * D], logsumexp [B, heads, T].

    calls: from `fused_calls_of`.
    sinks: [heads], a further logit of every row, without a value; the logsumexp includes the sink.
    """
    q, k, v = heads_of(query, head_dim), heads_of(key, head_dim), heads_of(value, head_dim)
    if isinstance(calls, FusedCall):
        output, lse = fused(q, k, v, 0.0, calls.causal, attn_mask=calls.mask, scale=scale)
    else:
        output, lse = _attend_in_calls(q, k, v, calls, scale)
    if sinks is not None:
        output, lse = _with_sinks(output, lse, sinks)
    return output.transpose(1, 2).reshape(query.shape), lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    calls: FusedCalls,
    *,
    head_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from `forward`'s operands and results. grad: of the output."""
    g, q, k = heads_of(grad, head_dim), heads_of(query, head_dim), heads_of(key, head_dim)
    v, out = heads_of(value, head_dim), heads_of(output, head_dim)
    if isinstance(calls, FusedCall):
        dq, dk, dv = fused_backward(g, q, k, v, out, lse, 0.0, calls.causal, attn_mask=calls.mask, scale=scale)
        dkey, dvalue = dk.transpose(1, 2).reshape(key.shape), dv.transpose(1, 2).reshape(value.shape)
        return dq.transpose(1, 2).reshape(query.shape), dkey, dvalue
    sums = any(_share_tokens(of_rows) for _, of_rows in calls)
    dtype = torch.promote_types(q.dtype, torch.float32) if sums else q.dtype
    totals = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value)]
    dq, dk, dv = (heads_of(total, head_dim) for total in totals)
    for rows, of_rows in calls:
        for call in of_rows:
            parts = _attend_backward(g, q, k, v, out, lse, rows, call, scale)
            for total, part, tokens in zip((dq, dk, dv), parts, (call.queries, call.keys, call.keys), strict=True):
                here = total[rows, :, tokens]
                here.add_(part) if sums else here.copy_(part)
    return tuple(total.to(q.dtype) for total in totals)  # type: ignore[return-value]


def _attend_in_calls(q: Tensor, k: Tensor, v: Tensor, calls: CallsByRows, scale: float) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of all rows, call by call."""
    B, heads, T, D = q.shape
    output = q.new_zeros(B, T, heads, D).transpose(1, 2)  # 0 for a query without keys
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((B, heads, T), -torch.inf, dtype=wide, device=q.device)
    for rows, of_rows in calls:
        for call in of_rows:
            of_output, of_lse = output[rows, :, call.queries], lse[rows, :, call.queries]
            part, part_lse = _attend(q, k, v, rows, call, scale)
            if call.merges:
                merge_into(of_output, of_lse, part, part_lse)
            else:
                of_output.copy_(part)
                of_lse.copy_(part_lse)
    return output, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: slice, call: FusedCall, scale: float) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of a call's queries over the call's keys."""
    q, k, v = q[rows, :, call.queries], k[rows, :, call.keys], v[rows, :, call.keys]
    return fused(q, k, v, 0.0, call.causal, attn_mask=call.mask, scale=scale)  # type: ignore[no-any-return]


def _attend_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: slice, call: FusedCall, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a call's queries, keys and values. out, lse: over all keys of the queries."""
    g, q, out, lse = (x[rows, :, call.queries] for x in (g, q, out, lse))
    k, v = k[rows, :, call.keys], v[rows, :, call.keys]
    return fused_backward(g, q, k, v, out, lse, 0.0, call.causal, attn_mask=call.mask, scale=scale)  # type: ignore[no-any-return]


def merge_into(output: Tensor, lse: Tensor, further: Tensor, further_lse: Tensor) -> None:
    """Change the results of queries over some keys, in place, into the results over these and more keys.

    output, further: [B, heads, T, D]. lse, further_lse: the logsumexps [B, heads, T]. Called for the calls of a row,
    and by attention with keys of further ranks (exchanged.py).
    """
    total = torch.logaddexp(lse, further_lse)
    shares = ((each - total).exp_().unsqueeze(-1) for each in (lse, further_lse))
    output.copy_(output * next(shares) + further * next(shares))
    lse.copy_(total)


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks [heads] to the denominators of the softmax of each head's rows."""
    total = add_sinks(lse, sinks)
    return (output * (lse - total).exp_().unsqueeze(-1)).to(output.dtype), total


def add_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """The logsumexp lse [..., heads, T] with a sink for each head. As in softmax, a sink of infinity gives NaN.

    Without NaN, a weight of infinity would turn the head's output into zeros, and hide a model that has diverged.
    """
    sinks = sinks.to(lse.dtype)
    return torch.logaddexp(lse, sinks.masked_fill(sinks == torch.inf, torch.nan).unsqueeze(-1))


def sinks_gradient(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, summed over all rows. A sink has the weight exp(sink - lse) in a row, and no value."""
    delta = (grad.to(lse.dtype) * output).view(*grad.shape[:-1], len(sinks), -1).sum(-1)  # [B, T, heads]
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp_()  # [B, heads, T]
    return -(weights.mT * delta).sum((0, 1)).to(sinks.dtype)


def fused_calls_of(seen: Tensor | None, T: int, S: int, causal: bool, dtype: torch.dtype) -> FusedCalls:
    """The calls of torch's fused attention for a batch. If all rows see alike, each call computes all rows.

    seen: int32 [B or 1, T, 2], the first key each query sees, and the key after the last. None, as `ranges_of`, in two
    cases: causal with T == S, where a query sees the keys up to its own; and otherwise, where every query sees all
    keys. A causal call whose first query does not see all of S > T keys has no None.
    dtype: of the masks.
    """
    everything = slice(0, T), slice(0, S)
    if seen is None:
        return FusedCall(*everything, causal=causal and T == S)
    rows = rows_alike(seen)
    if T * S <= SMALL and bool((seen[..., 0] < seen[..., 1]).all()):
        return FusedCall(*everything, mask=_mask(seen, S, dtype))
    return [(each, list(fused_calls_of_row(seen[each][0], dtype))) for each in rows]


def has_masks(calls: FusedCalls) -> bool:
    """Whether a call has a mask. The call multiplies hidden values by 0, and 0 * NaN is NaN.

    If so, the caller checks the results, and computes anew by `blocks` where a result is not finite.
    """
    every = [calls] if isinstance(calls, FusedCall) else [call for _, of_rows in calls for call in of_rows]
    return any(call.mask is not None for call in every)


def rows_alike(seen: Tensor) -> list[slice]:
    """A slice of all rows of the batch if all have equal bounds, otherwise a slice for each row. seen: [B, T, 2]."""
    if len(seen) == 1 or seen.equal(seen[:1].expand_as(seen)):
        return [slice(None)]
    return [slice(row, row + 1) for row in range(len(seen))]


def _mask(seen: Tensor, S: int, dtype: torch.dtype) -> Tensor:
    """A mask [B, 1, T, S] to add to the scores: 0, or -inf where a query does not see a key. seen: [B, T, 2]."""
    key = torch.arange(S, device=seen.device)
    unseen = (key < seen[..., :1]) | (key >= seen[..., 1:])  # [B, T, S]
    return torch.zeros(unseen.shape, dtype=dtype, device=seen.device).masked_fill_(unseen, -torch.inf).unsqueeze(1)


def fused_calls_of_row(keys: Tensor, dtype: torch.dtype) -> Iterator[FusedCall]:
    """The calls of torch's fused attention for a row, in the order of the queries.

    keys: [T, 2], the first key each query sees, and the key after the last. Queries without keys are in no call.
    dtype: of the masks.
    """
    for group in _groups_for_masks(_stretches_of(keys)):
        first, stop, kind, start, end, _ = group[0]
        if len(group) > 1:
            stop, end = group[-1].stop, group[-1].last_end
            yield FusedCall(
                slice(first, stop), slice(start, end), mask=_mask(keys[None, first:stop] - start, end - start, dtype)
            )
        elif kind == SAME_KEYS or stop - first == 1:
            if start < end:
                yield FusedCall(slice(first, stop), slice(start, end))
        elif kind == ONE_MORE_KEY:
            yield from _triangle(first, stop, start, end)
        elif start < end:
            yield from _band(first, stop, start, end, dtype)


def _stretches_of(keys: Tensor) -> list[_Stretch]:
    """The stretches of a row. keys: [T, 2], the first key each query sees, and the key after the last."""
    steps = keys.diff(dim=0).clamp_(-1, 2)
    kinds, counts = torch.unique_consecutive(3 * steps[:, 0] + steps[:, 1], return_counts=True)
    runs = [*zip(kinds.tolist(), counts.tolist(), strict=True), (None, 0)]
    found: list[tuple[int, int, int]] = []  # first, stop and kind of each stretch
    first = query = 0  # the first query not yet in a stretch, and the query from which the run's first step leads
    for (kind, count), (following, _) in pairwise(runs):
        query += count
        if kind in (SAME_KEYS, ONE_MORE_KEY, NEXT_WINDOW):
            # The query between two runs fits both. The causal run gets the query: a document of a single token looks
            # like the last query of a window.
            stop = query if following == ONE_MORE_KEY else query + 1
            if first < stop:
                found.append((first, stop, kind))
                first = stop
        else:
            found += [(single, single + 1, SAME_KEYS) for single in range(first, query)]
            first = query
    if first < len(keys):
        found.append((first, len(keys), SAME_KEYS))
    bounds = keys[[first for first, _, _ in found]].tolist()
    last_ends = keys[[stop - 1 for _, stop, _ in found], 1].tolist()
    return [
        _Stretch(first, stop, kind, start, end, last_end)
        for (first, stop, kind), (start, end), last_end in zip(found, bounds, last_ends, strict=True)
    ]


def _groups_for_masks(stretches: list[_Stretch]) -> Iterator[list[_Stretch]]:
    """The stretches in groups: short neighbours which a single call with a mask computes, or a long stretch."""
    group: list[_Stretch] = []
    for each in stretches:
        if group:
            queries, keys = each.stop - group[0].first, each.last_end - group[0].start
            # A call with a mask cannot compute a query without keys.
            see = group[0].start < group[0].end and each.start < each.end
            if not see or queries > LEAST_BLOCK or queries * keys > SMALL:
                yield group
                group = []
        group.append(each)
    yield group


def _triangle(first: int, stop: int, start: int, end: int) -> Iterator[FusedCall]:
    """The calls for a ONE_MORE_KEY stretch: query `first` sees the keys `start` to `end`, each next a key more."""
    if start == end:  # the first query sees nothing
        first, end = first + 1, end + 1
    queries, own = slice(first, stop), slice(end - 1, end - 1 + stop - first)
    if start < end - 1:
        yield FusedCall(queries, slice(start, end - 1))
    yield FusedCall(queries, own, causal=True, merges=start < end - 1)


def _band(first: int, stop: int, start: int, end: int, dtype: torch.dtype) -> Iterator[FusedCall]:
    """The calls for a NEXT_WINDOW stretch: query `first` sees the keys `start` to `end`, a window which moves on."""
    window = end - start
    block = min(stop - first, max(LEAST_BLOCK, min(window // 8, MOST_BLOCK)))
    full = torch.full((block, block + window - 1), -torch.inf, dtype=dtype, device="cpu")
    mask = full.tril(-1) + full.triu(window)  # one mask for all blocks: query i sees the keys i to i + window - 1
    for query in range(first, stop, block):
        n, key = min(block, stop - query), start + query - first
        width = n + window - 1
        yield FusedCall(slice(query, query + n), slice(key, key + width), mask=mask[:n, :width])


def _share_tokens(calls: list[FusedCall]) -> bool:
    """Whether two calls for a row have a query or a key in common. If they do, gradients must be added."""
    stop = 0
    for call in calls:
        if call.merges or call.keys.start < stop:
            return True
        stop = call.keys.stop
    return False


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads * D] -> [B, heads, T, D], with contiguous D."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)
