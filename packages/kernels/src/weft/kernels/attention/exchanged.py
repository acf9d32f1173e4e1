"""Attention of a rank's queries to its own keys and to keys received from other ranks, merged by logsumexp.

For context parallelism of packed rows. The rank's rows are laid end to end as a single row, [1, N, ...], in which
ranges say which keys each query sees. Attention to the rank's own keys is computed while received keys, and in
backward their gradients, are under way. The backward of each part gets the merged output and logsumexp (Dao 2023,
section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from weft.mesh import derive_key

from ..dispatch.op import Tensors
from ..dropout.function import number_of, quantized
from .compute import attend, attend_backward
from .options import Drop, Scores, VisibleKeys
from .stretches import heads_of, merge_into


class Places(NamedTuple):
    """The rows and places of queries and keys, for dropout's masks. int64 tensors on the device.

    A place is a token's index in its global row. N: this rank's tokens, over all rows. R: received keys.
    """

    queries: Tensor  # [N]: the place of each of this rank's tokens, as a query and as an own key
    rows: Tensor  # [N]: the row of each of this rank's tokens, among this rank's rows
    received: Tensor  # [R]: the place of each received key


class ReceivedKeys(Protocol):
    """Keys and values on their way to this rank, and the way back for their gradients."""

    @property
    def own(self) -> VisibleKeys:
        """Which of the rank's own keys each query sees."""

    @property
    def received(self) -> VisibleKeys:
        """Which of the received keys each of `queries` sees."""

    @property
    def queries(self) -> slice:
        """The queries from the first to the last that sees a received key."""

    @property
    def places(self) -> Places:
        """The places of queries and keys, for dropout."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """The received keys and values, [1, R, kv_heads * D] each: row after row, each in reading order."""

    def return_gradients(self, dkey: Tensor, dvalue: Tensor) -> Callable[[Tensor, Tensor], None]:
        """Start to send the gradients of received keys and values, [1, R, kv_heads * D] each, to the keys' ranks.

        Returns a function to call with the gradients of this rank's own keys and values, [N, kv_heads * D] each: the
        function waits for the gradients from ranks which received own keys, and adds them in place.
        """


class _ExchangeOptions(NamedTuple):
    """The options of one call, and this rank's part of the global weights [B, heads, T, T]."""

    scores: Scores
    dropout: float  # the share of attention weights set to zero
    number: int  # the dropout key as an int; not read where the call has a tensor for the dropout key
    name: str | None  # combined with the dropout key: each layer draws another mask
    first_row: int  # the first of this rank's rows
    first_head: int  # the first of this rank's query heads
    heads: int  # query heads of all ranks
    tokens: int  # T, the tokens of a row on all ranks

    def drop(self, dropout_key: Tensor | None, places: Places, keys: Tensor, queries: slice) -> Drop | None:
        """The `Drop` of weights between `queries`, a slice of this rank's, and keys. keys: int64, the keys' places."""
        if not self.dropout:
            return None
        number = self.number if dropout_key is None else number_of(dropout_key)
        number = number if self.name is None else derive_key(number, self.name)
        threshold, scale = quantized(self.dropout)
        # Index row * heads * T * T + head * T * T + query * T + key: a row counts as heads * T queries.
        rows = (self.first_row + places.rows[queries]) * self.heads * self.tokens
        at = (rows + places.queries[queries]).unsqueeze(0)
        offset = torch.tensor([self.first_head * self.tokens**2], device=keys.device)
        return Drop(number, threshold, scale, offset, self.tokens**2, self.tokens, at, keys.unsqueeze(0))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_key: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    received: ReceivedKeys,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    **given: Any,
) -> tuple[Tensor, Tensors]:
    """query [B, t, heads * D], key and value [B, t, kv_heads * D] of this rank's tokens -> the output like query.

    sinks: [heads], as for `compute.attend`. Only the part of the own keys has sinks, so each row counts its sink once.
    head_dim, scale, softcap: `Scores`. given: further fields of `_ExchangeOptions`.
    Saves the operands, the received keys and values, the output and a logsumexp a row and head.
    """
    options = _ExchangeOptions(Scores(head_dim, scale, softcap), **given)
    places, queries = received.places, received.queries
    q, k, v = (x.reshape(1, -1, x.shape[-1]) for x in (query, key, value))
    drop = options.drop(dropout_key, places, places.queries, slice(None))
    output, lse = _attend(q, k, v, received.own, sinks, drop, options.scores)
    further_key, further_value = received.wait()
    if further_key.numel() and q.numel():
        drop = options.drop(dropout_key, places, places.received, queries)
        further, further_lse = _attend(
            q[:, queries], further_key, further_value, received.received, None, drop, options.scores
        )
        if not q.is_meta:
            seeing, further = heads_of(output[:, queries], head_dim), heads_of(further, head_dim)
            merge_into(seeing, lse[:, :, queries], further, further_lse)
    output = output.view(query.shape)
    return output, (query, key, value, dropout_key, sinks, further_key, further_value, output, lse)


def backward(
    saved: Tensors,
    grad: Tensor,
    needed: Sequence[bool],
    *,
    received: ReceivedKeys,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    **given: Any,
) -> Tensors:
    """The gradients of query, key, value and sinks; None for the dropout key. grad: of the output."""
    operands: Any = saved
    query, key, value, dropout_key, sinks, further_key, further_value, output, lse = operands
    options = _ExchangeOptions(Scores(head_dim, scale, softcap), **given)
    places, queries, scores = received.places, received.queries, options.scores
    g, q, k, v, out = (x.reshape(1, -1, x.shape[-1]) for x in (grad, query, key, value, output))
    sees = bool(further_key.numel() and q.numel())
    of_received, of_query = (torch.zeros_like(further_key), torch.zeros_like(further_value)), None
    if sees:
        drop = options.drop(dropout_key, places, places.received, queries)
        part = (q[:, queries], further_key, further_value, out[:, queries], lse[:, :, queries])
        of_query, *gradients, _ = _attend_backward(g[:, queries], *part, received.received, None, drop, scores)
        of_received = gradients[0], gradients[1]
    finish = received.return_gradients(*of_received)
    drop = options.drop(dropout_key, places, places.queries, slice(None))
    dq, dk, dv, dsinks = _attend_backward(g, q, k, v, out, lse, received.own, sinks, drop, scores)
    if of_query is not None:
        dq[:, queries] += of_query
    finish(dk[0], dv[0])
    every = (dq.view(query.shape), dk.view(key.shape), dv.view(value.shape), None, dsinks)
    return tuple([each if need else None for each, need in zip(every, needed, strict=False)])


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: VisibleKeys,
    sinks: Tensor | None,
    drop: Drop | None,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """`compute.attend`, also of no queries, and on the meta device."""
    if not q.numel() or q.is_meta:
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.empty_like(q), q.new_empty((1, q.shape[-1] // scores.head_dim, q.shape[1]), dtype=wide)
    return attend(q, k, v, visible, sinks, drop, scores)


def _attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: VisibleKeys,
    sinks: Tensor | None,
    drop: Drop | None,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`compute.attend_backward`, also of no queries, and on the meta device. out, lse: over the keys of all parts."""
    if not q.numel() or q.is_meta:
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks
    return attend_backward(g, q, k, v, out, lse, visible, sinks, drop, scores)
