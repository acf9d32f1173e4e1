"""Attention in plain torch, by blocks of queries: memory holds the scores of a single block at a time.

Runs calls on a CPU for which torch's fused attention does not serve: with a softcap, with dropout of the weights, or
with NaN or infinite numbers. Also runs float64 on a GPU.
Backward computes each block's scores again. All arithmetic is in float32 at least. For each head:

    scores = scale * query @ key.T, or with a softcap softcap * tanh(scale * query @ key.T / softcap)
    logsumexp = log(exp(sink) + the sum of exp(scores) over the keys seen)
    weights = exp(scores - logsumexp) for the keys seen, otherwise 0
    output = dropped(weights) @ value, where dropout multiplies a weight by drop.scale or by 0

Keys which a query does not see take no part in the query's row, also if the keys are NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch.backend import can_read
from ..dropout.function import DROPS_ALL, plain_mask
from ..random.philox import Part
from .options import Drop
from .ranges import Ranges
from .stretches import add_sinks, rows_alike, sinks_gradient

MOST_SCORES = 2**21  # scores of a block, over all rows and heads: 8 MB in float32. LEAST queries may have more
LEAST, MOST = 16, 128  # queries of a block. In a block of n queries, a query computes up to n masked scores


class QueryBlock(NamedTuple):
    """Neighbouring queries whose scores are computed at a time, and the keys which at least one query sees."""

    rows: slice  # rows of the batch
    queries: slice
    keys: slice
    seen: Tensor | None  # whether a query sees a key: bool [B or 1, 1, 1, n, keys]. None: every query sees every key


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: Ranges,
    sinks: Tensor | None,
    drop: Drop | None,
    *,
    head_dim: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """query [B, T, heads * D], key and value [B, S, kv_heads * D] -> output [B, T, heads * D], logsumexp [B, heads, T].

    sinks: [heads], a further logit of every row, without a value; the logsumexp includes the sink.
    softcap: above 0; None: scores stay. sinks, drop: None: without sinks, without dropout.
    """
    kv_heads = key.shape[-1] // head_dim
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    q, k, v, out = (_grouped(x, kv_heads, head_dim) for x in (query, key, value, output))
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)  # [B, kv_heads, groups, T]
    for block in blocks_of(ranges.keys, q.shape[:3].numel(), k.shape[3]):
        rows, queries, keys, _ = block
        scores = _scores(q, k, block, wide, scale, softcap)
        of_rows = scores.logsumexp(-1)  # [B, kv_heads, groups, n]
        if sinks is not None:
            of_rows = add_sinks(of_rows, sinks.view(kv_heads, -1))
        weights = _dropped(_weights(scores, of_rows), _keep_mask(drop, block, q), drop)
        out[rows, :, :, queries] = _product(weights, v[rows, :, :, keys].to(wide), block.seen).to(out.dtype)
        lse[rows, :, :, queries] = of_rows
    return output, lse.flatten(1, 2)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    ranges: Ranges,
    sinks: Tensor | None,
    drop: Drop | None,
    *,
    head_dim: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks, from `forward`'s operands and results. grad: of the output.

    Further arguments: as for `forward`. The gradient of the sinks is None without sinks.
    """
    kv_heads, wide = key.shape[-1] // head_dim, lse.dtype
    totals = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (query, key, value)]
    g, q, k, v, out = (_grouped(x, kv_heads, head_dim) for x in (grad, query, key, value, output))
    dq, dk, dv = (_grouped(x, kv_heads, head_dim) for x in totals)
    lse = lse.reshape(q.shape[:-1])
    for block in blocks_of(ranges.keys, q.shape[:3].numel(), k.shape[3]):
        rows, queries, keys, seen = block
        upstream, of_keys, of_queries = (
            x.to(wide) for x in (g[rows, :, :, queries], k[rows, :, :, keys], q[rows, :, :, queries])
        )
        scores, keep = _scores(q, k, block, wide, scale, softcap), _keep_mask(drop, block, q)
        slope = None if softcap is None else 1 - (scores / softcap).square_()  # of softcap * tanh(x / softcap)
        weights = _weights(scores, lse[rows, :, :, queries])
        if seen is not None:
            weights.masked_fill_(~seen, 0)  # NaN of a query whose logsumexp is NaN
        seen_by = None if seen is None else seen.mT
        dropped_weights = _dropped(weights.clone(), keep, drop)
        dv[rows, :, :, keys] += _product(dropped_weights.mT, upstream, seen_by).sum(2, keepdim=True)
        delta = (upstream * out[rows, :, :, queries]).sum(-1, keepdim=True)
        of_scores = _dropped(upstream @ v[rows, :, :, keys].to(wide).mT, keep, drop).sub_(delta).mul_(weights)
        if slope is not None:
            of_scores.mul_(slope.nan_to_num_(0.0, 0.0, 0.0))  # the scores of keys that are not seen are -inf
        of_scores.mul_(scale)
        if seen is not None:
            of_scores.masked_fill_(~seen, 0)
        dq[rows, :, :, queries] = _product(of_scores, of_keys, seen)
        dk[rows, :, :, keys] += _product(of_scores.mT, of_queries, seen_by).sum(2, keepdim=True)
    dquery, dkey, dvalue = (total.to(query.dtype) for total in totals)
    return dquery, dkey, dvalue, None if sinks is None else sinks_gradient(grad, output, lse.flatten(1, 2), sinks)


def blocks_of(bounds: Tensor, heads: int, S: int) -> Iterator[QueryBlock]:
    """The blocks of a batch. Rows with equal bounds share their blocks; otherwise each row has blocks of its own.

    bounds: int32 [B or 1, T, 2], the first key each query sees, and the key after the last. If the host cannot
    read the bounds, all rows share blocks with all S keys.
    heads: heads of a row, times B.
    """
    T, key = bounds.shape[1], torch.arange(S, dtype=torch.int32, device=bounds.device)
    if not can_read(bounds):
        n = max(1, MOST_SCORES // (heads * S))
        for first in range(0, T, n):
            queries = slice(first, min(first + n, T))
            yield QueryBlock(slice(None), queries, slice(0, S), _seen(bounds[:, queries], key))
        return
    rows = rows_alike(bounds)
    for each in rows:
        of_row = bounds[each][:1]
        widest = int((of_row[..., 1] - of_row[..., 0]).max())
        n = max(LEAST, min(MOST, MOST_SCORES * len(rows) // (heads * max(1, widest))))
        for first in range(0, T, n):
            here = of_row[:, first : first + n]
            (start, end), (last_start, stop) = here[0, 0].tolist(), here[0, -1].tolist()
            if start < stop:
                all_see_all = start == last_start and end == stop
                seen = None if all_see_all else _seen(here, key[start:stop])
                yield QueryBlock(each, slice(first, min(first + n, T)), slice(start, stop), seen)


def _seen(bounds: Tensor, key: Tensor) -> Tensor:
    """Whether queries of these bounds [B, n, 2] see each key: bool [B, 1, 1, n, keys]."""
    bounds = bounds[:, None, None]
    return (key >= bounds[..., :1]) & (key < bounds[..., 1:])


def _scores(q: Tensor, k: Tensor, block: QueryBlock, wide: torch.dtype, scale: float, softcap: float | None) -> Tensor:
    """The scores of a block, -inf for keys that a query does not see: [B, kv_heads, groups, n, keys]."""
    scores = (q[block.rows, :, :, block.queries].to(wide) * scale) @ k[block.rows, :, :, block.keys].to(wide).mT
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    return scores if block.seen is None else scores.masked_fill_(~block.seen, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), written over the scores; 0 in rows that see nothing, whose scores and lse are -inf."""
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()


def _product(weights: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
    """weights @ x, without the products that are not `seen`: there the weight is 0, but 0 * NaN would give NaN.

    weights: [..., n, m]. x: [..., m, D]. seen: bool, broadcast to the weights; None for all.
    """
    if seen is None:
        return weights @ x
    is_finite = x.isfinite()
    if can_read(x) and bool(is_finite.all()):
        return weights @ x
    is_spoiled = seen.to(x.dtype) @ (~is_finite).to(x.dtype) > 0
    return (weights @ x.masked_fill(~is_finite, 0)).masked_fill_(is_spoiled, torch.nan)


def _dropped(weights: Tensor, keep: Tensor | None, drop: Drop | None) -> Tensor:
    """Dropout of the weights, or of their gradient, in place. keep: from `_keep_mask`."""
    if drop is None:
        return weights
    return (weights if keep is None else weights.masked_fill_(~keep, 0)).mul_(drop.scale)


def _keep_mask(drop: Drop | None, block: QueryBlock, q: Tensor) -> Tensor | None:
    """Which weights of a block dropout keeps: bool [B, kv_heads, groups, n, keys].

    None without dropout, and if dropout drops all weights: then `drop.scale` is 0.
    """
    if drop is None or drop.threshold == DROPS_ALL:
        return None
    n, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
    heads = q.shape[1] * q.shape[2]
    keep = []
    for row in range(q.shape[0])[block.rows]:
        offset = int(drop.offsets[row])
        mask = torch.empty(heads, n, keys, dtype=torch.bool, device=q.device)
        of_queries = _runs(drop.query_places, drop.first_query, row, block.queries)
        for (i, rows, query), (j, columns, key) in product(
            of_queries, _runs(drop.key_places, drop.first_key, row, block.keys)
        ):
            strides = (drop.head_stride, drop.row_stride, 1)
            part = Part(offset + query * drop.row_stride + key, (heads, rows, columns), strides)
            mask[:, i : i + rows, j : j + columns] = plain_mask(part, drop.key, drop.threshold, q.device) != 0
        keep.append(mask)
    return torch.stack(keep).view(-1, *q.shape[1:3], n, keys)


def _runs(places: Tensor | None, first: int, row: int, here: slice) -> list[tuple[int, int, int]]:
    """The runs of consecutive places in `here`, each as (index in `here`, length, first place).

    places, first: `query_places` and `first_query` of a `Drop`, or the two for keys. row: of the batch.
    here: the block's queries or keys.
    """
    if places is None:
        return [(0, here.stop - here.start, first + here.start)]
    numbers = places[min(row, len(places) - 1), here].tolist()
    begins = [i for i, place in enumerate(numbers) if i == 0 or place != numbers[i - 1] + 1]
    return [(i, stop - i, numbers[i]) for i, stop in zip(begins, [*begins[1:], len(numbers)], strict=True)]


def _grouped(x: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """[B, T, heads * D] -> [B, kv_heads, heads // kv_heads, T, D]"""
    return x.reshape(*x.shape[:-1], kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
