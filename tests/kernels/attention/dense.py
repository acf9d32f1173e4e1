"""Attention with every score written out, on the whole tensor: the truth in float64, and eager torch in other dtypes.

Shares no code with the package: who sees whom is a mask [T, S], written from the words of the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support import philox


class Dropped(NamedTuple):
    """Dropout of the weights [B, heads, T, S], which are a box of global weights."""

    p: float
    key: int
    index: Tensor  # int64 [B, heads, T, S]: the place of each weight among the global ones


def seen_by(
    T: int,
    S: int,
    *,
    places: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Which keys each query sees: bool [B or 1, T, S].

    places, keys: the token of each query and of each key; without them the last T of the tokens 0 to S, and all.
    documents: ids [..., tokens]; each stretch of equal ids is one document.
    """
    query = torch.arange(S - T, S) if places is None else torch.tensor(places, dtype=torch.int64)
    key = torch.arange(S) if keys is None else torch.tensor(keys, dtype=torch.int64)
    seen = torch.ones(1, len(query), len(key), dtype=torch.bool)
    if causal:
        seen = seen & (key <= query[:, None])
    if window is not None:
        seen = seen & (query[:, None] - key < window)
    if documents is not None:
        ids = documents.reshape(-1, documents.shape[-1])
        stretch = torch.zeros_like(ids)
        for token in range(1, ids.shape[1]):
            stretch[:, token] = stretch[:, token - 1] + (ids[:, token] != ids[:, token - 1])
        seen = seen & (stretch[:, query, None] == stretch[:, None, key])
    return seen


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    head_dim: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropped: Dropped | None = None,
) -> tuple[Tensor, Tensor]:
    """query [B, T, heads * D], key and value [B, S, kv_heads * D] -> the output like query, logsumexp [B, heads, T].

    seen: bool [B or 1, T, S]. sinks: [heads]. A query that sees nothing gives 0.
    """
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (head_dim**-0.5 if scale is None else scale)  # [B, heads, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = seen.unsqueeze(1)
    wide = wide.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide.dtype)[None, :, None, None].expand(*wide.shape[:-1], 1)
        wide = torch.cat((wide, sink), -1)
        sees = torch.ones_like(wide[..., :1], dtype=torch.bool)
    else:
        sees = seen.any(-1, keepdim=True).expand(*wide.shape[:-1], 1)
        wide = torch.cat((wide, torch.where(sees, -torch.inf, 0.0).to(wide)), -1)  # a row of -inf has no gradient
    weights = wide.softmax(-1)[..., :-1]
    logsumexp = torch.where(sees[..., 0], wide.logsumexp(-1), -torch.inf)
    if dropped is not None:
        share = 1 - round(dropped.p * 2**16) / 2**16
        kept = philox.kept(dropped.index, dropped.p, dropped.key).to(weights.device)
        weights = torch.where(kept, weights / share, 0) if share else torch.zeros_like(weights)
    return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(-2), logsumexp
