"""Attention on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.backend import WIDE
from ...dispatch.op import Op
from ...dispatch.sharded import apply, autocasts, check_devices
from ...dispatch.token_order import checked_order
from ...dropout.sharded import check_dropout
from .. import reference
from .cache import KeyValueCache
from .layout_rule import cache_rule, rule


@autocasts("attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    head_dim: int,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    order: Sequence[tuple[int, int]] | None = None,
    dropout: float = 0.0,
    dropout_key: int | Tensor | None = None,
    dropout_name: str | None = None,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017), with grouped queries where there are fewer key heads.

    query: [..., T, heads * D]. The T queries belong to the last T of the keys' tokens.
    key, value: [..., S, kv_heads * D], where kv_heads divides heads.
    Returns a tensor of the shape of `query`.
    scale: the factor of query @ key.T; None means 1 / sqrt(D).
    causal: a query sees the keys up to its own token's.
    window: with causal, a query sees at most the last `window` of these keys (Child et al., 2019).
    documents: [..., S] of ints, the document of each key's token. A query sees the keys of its own document only.
    order: for tokens stored in another order than the sequence's, as context parallelism stores them: runs [start,
    stop) of the sequence, in the order of storage. Causal, window and dropout then follow the sequence. Each run of
    queries computes with the keys up to its own last token only.
    dropout: the share of attention weights set to zero, 0 to 1; the rest are divided by 1 - dropout. The attention
    weights, T * S numbers for each head, are then in memory.
    dropout_key, dropout_name: as `key` and `name` of `dropout`, for attention weights [..., heads, T, S]. The mask is
    the same in every layout, and in every repetition of the call.
    cache: holds the keys and values of earlier tokens; this call adds those of its own. query, key and value are then
    of the new tokens only, documents is [..., capacity], and no gradient is recorded.

    Layouts: query, key and value share one layout, sharded on the leading dims or by complete heads; the query may
    also be sharded on the tokens. documents are sharded on the leading dims as the query is. The output has the
    query's layout.
    Communication: none.
    Raises LayoutError for any other layouts, ValueError for mismatched shapes, dtypes, devices or options,
    RuntimeError for a cache where gradients are recorded.
    """
    _check(query, key, value, head_dim, causal and cache is None)
    check_devices("attention", query, key, value, documents)
    if query.dtype not in WIDE or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"attention: query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; cast them with .to(), "
            f"to one of {', '.join(map(str, WIDE))}"
        )
    S = key.shape[-2] if cache is None else cache.capacity
    _check_seen(query, S, causal, window, documents)
    options: dict[str, Any] = {"head_dim": head_dim, "causal": causal, "scale": scale, "window": window}
    if cache is not None:
        _check_with_cache(query, key, value, causal, dropout)
        if order is not None:
            raise ValueError("attention: a cache stores tokens in the order of the sequence; leave order out")
        output = apply(WITH_CACHE, query, key, value, *cache.room_for(key), documents, length=cache.length, **options)
        cache.length += key.shape[-2]
        return output
    operand = None
    if dropout:
        if dropout_key is None:
            raise ValueError(
                f'attention has dropout={dropout} and no dropout_key; give derive_key(seed, "dropout", step)'
            )
        operand, number = check_dropout("attention", "dropout", dropout, dropout_key)
        options |= {"dropout": float(dropout), "number": number, "name": dropout_name}
    if order is not None:
        if query.shape[-2] != S:
            raise ValueError(
                f"attention: order describes all tokens, but there are {query.shape[-2]} queries and {S} keys"
            )
        options["order"] = checked_order("attention", order, S)
    return apply(ATTENTION if order is None else IN_ORDER, query, key, value, documents, operand, **options)


def _check(query: Tensor, key: Tensor, value: Tensor, head_dim: int, causal: bool) -> None:
    """Raises ValueError for mismatched shapes of query, key and value."""
    of_query, of_key = query.shape, key.shape
    fits = len(of_query) > 1 and of_key == value.shape and of_key[:-2] == of_query[:-2] and of_key[-1] > 0
    if not fits or of_query[-1] % head_dim or of_key[-1] % head_dim or of_query[-1] % of_key[-1]:
        raise ValueError(
            f"attention takes query [..., T, heads * {head_dim}] and key and value [..., S, kv_heads * {head_dim}], "
            f"where kv_heads divides heads; got {tuple(of_query)}, {tuple(of_key)} and {tuple(value.shape)}; reshape "
            f"them, or give another head_dim"
        )
    if causal and of_query[-2] > of_key[-2]:
        raise ValueError(
            f"attention: causal needs at least as many keys as queries, got {of_key[-2]} and {of_query[-2]}; give the "
            f"missing keys"
        )


def _check_seen(query: Tensor, S: int, causal: bool, window: int | None, documents: Tensor | None) -> None:
    """Raises ValueError for a window or documents that do not fit the query and the S keys."""
    T = query.shape[-2]
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ValueError(f"attention: window is {window}; give how many keys a query sees, 1 or more")
    if window is not None and not causal:
        raise ValueError(f"attention: a window of {window} needs causal=True; leave window out")
    if documents is None:
        return
    if documents.shape != (*query.shape[:-2], S) or documents.is_floating_point():
        raise ValueError(
            f"attention takes documents [..., {S}] of ints, one for each key, got {tuple(documents.shape)} of "
            f"{documents.dtype} beside a query of {tuple(query.shape)}"
        )
    if T > S:
        raise ValueError(f"attention: {T} queries have no documents among {S} keys; give at least as many keys")


def _check_with_cache(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> None:
    """Raises ValueError or RuntimeError for arguments that do not fit a call with a cache."""
    if not causal or query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"attention: a call with a cache needs causal=True, and query, key and value of the new tokens only; got "
            f"causal={causal}, {query.shape[-2]} queries and {key.shape[-2]} keys"
        )
    if dropout:
        raise ValueError(f"attention: a cache is not for training, but dropout={dropout}; call model.eval() first")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise RuntimeError("attention: a cache has no gradient; call the model in torch.no_grad()")


ATTENTION = Op("attention", reference.forward, None, rule, varying=("number",))
IN_ORDER = Op("attention_in_order", reference.forward_in_order, None, rule, varying=("number",))
WITH_CACHE = Op("attention_with_cache", reference.forward_with_cache, None, cache_rule, varying=("length",))
