"""attention on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import WIDE
from ...dropout.sharded import check_dropout
from ...op import Op
from ...order import checked_order
from ...sharded import apply, autocasts, check_devices
from .. import reference
from .cache import KeyValueCache
from .layouts import reading_rule, rule


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

    query: [..., T, heads * D]. key, value: [..., S, kv_heads * D]. Returns the shape of `query`. The queries are those of
    the last T keys' tokens. scale: 1 / sqrt(D) by default.
    causal: a query sees the keys up to its own token's. window: and of those the last `window` alone (Child et al., 2019).
    documents: [..., S] of ints, a number for each key's token: a query sees the keys of its own document alone.
    order: where the tokens of all four lie in another order than they are read in, which then counts for causal, for the window
    and for dropout: the runs of neighbours, [start, stop) of the sequence, in the order in which they lie. A run of queries
    computes with the keys up to its own last one alone.
    dropout: 0 to 1, the share of the weights that are zeroed, while the others are divided by 1 - dropout. dropout_key and
    dropout_name: as key and name of `dropout`, for a tensor of the weights, [..., heads, T, S]: the same mask in every layout,
    and again where the call is repeated. With dropout the weights are in memory, T * S of each head.
    cache: of the keys and values of the tokens before, to which those of these are added; there is no gradient then. query, key
    and value are of the new tokens alone, and documents [..., capacity] of all that there is room for.
    Layouts: query, key and value alike, sharded on the leading dims or by whole heads, or the queries alone sharded on the
    tokens; documents sharded on the leading dims as they are. The output lies as `query`. Communication: none.
    Raises LayoutError for any other layouts, ValueError for shapes, dtypes, devices and options that do not fit, RuntimeError for a
    cache where gradients are recorded.
    """
    _check(query, key, value, head_dim, causal and cache is None)
    check_devices("attention", query, key, value, documents)
    if query.dtype not in WIDE or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"attention: query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; cast them with .to(), to one of "
            f"{', '.join(map(str, WIDE))}"
        )
    S = key.shape[-2] if cache is None else cache.capacity
    _check_seen(query, S, causal, window, documents)
    options: dict[str, Any] = {"head_dim": head_dim, "causal": causal, "scale": scale, "window": window}
    if cache is not None:
        _check_reading(query, key, value, causal, dropout)
        if order is not None:
            raise ValueError("attention: a cache has tokens as they are read; leave order out")
        output = apply(READ_ON, query, key, value, *cache.room_for(key), documents, length=cache.length, **options)
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
            raise ValueError(f"attention: order is of all tokens, but there are {query.shape[-2]} queries and {S} keys")
        options["order"] = checked_order("attention", order, S)
    return apply(ATTENTION if order is None else IN_ORDER, query, key, value, documents, operand, **options)


def _check(query: Tensor, key: Tensor, value: Tensor, head_dim: int, causal: bool) -> None:
    """Raises ValueError for shapes that do not fit."""
    of_query, of_key = query.shape, key.shape
    fits = len(of_query) > 1 and of_key == value.shape and of_key[:-2] == of_query[:-2] and of_key[-1] > 0
    if not fits or of_query[-1] % head_dim or of_key[-1] % head_dim or of_query[-1] % of_key[-1]:
        raise ValueError(
            f"attention takes query [..., T, heads * {head_dim}] and key and value [..., S, kv_heads * {head_dim}], where kv_heads "
            f"divides heads; got {tuple(of_query)}, {tuple(of_key)} and {tuple(value.shape)}; reshape them, or give another head_dim"
        )
    if causal and of_query[-2] > of_key[-2]:
        raise ValueError(
            f"attention: causal needs at least as many keys as queries, got {of_key[-2]} and {of_query[-2]}; give the missing keys"
        )


def _check_seen(query: Tensor, S: int, causal: bool, window: int | None, documents: Tensor | None) -> None:
    """Raises ValueError for a window or documents that do not fit."""
    T = query.shape[-2]
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ValueError(f"attention: window is {window}; it is how many keys a query sees, 1 or more")
    if window is not None and not causal:
        raise ValueError(f"attention: a window of {window} needs causal=True; leave it out")
    if documents is None:
        return
    if documents.shape != (*query.shape[:-2], S) or documents.is_floating_point():
        raise ValueError(
            f"attention takes documents [..., {S}] of ints, one for each key, got {tuple(documents.shape)} of "
            f"{documents.dtype} beside a query of {tuple(query.shape)}"
        )
    if T > S:
        raise ValueError(f"attention: {T} queries have no documents among {S} keys; give at least as many keys")


def _check_reading(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> None:
    """Raises ValueError and RuntimeError for what a cache does not go with."""
    if not causal or query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"attention: a cache has the keys of the tokens before {query.shape[-2]} queries with {key.shape[-2]} keys, "
            f"causal={causal}; give query, key and value of the new tokens, and causal=True"
        )
    if dropout:
        raise ValueError(f"attention: a cache is not for training, but dropout={dropout}; call model.eval() first")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise RuntimeError("attention: what a cache keeps has no gradient; call the model in torch.no_grad()")


ATTENTION = Op("attention", reference.forward, None, rule, varying=("number",))
IN_ORDER = Op("attention_in_order", reference.in_order, None, rule, varying=("number",))
READ_ON = Op("attention_read_on", reference.read_on, None, reading_rule, varying=("length",))
