"""Attention of a rank's queries to its own keys and to keys received from other ranks, merged by logsumexp.

For context parallelism of packed rows. The rank's rows count as one row after another: a query's numbers in the ranges
say which keys it sees, whatever row they are of. Attention to the own keys is computed while the others are under way,
in backward as in forward. Backward of each part gets the merged output and logsumexp (Dao 2023, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from weft.mesh import derive_key

from ..dispatch.op import Tensors
from ..dropout.function import number_of, quantized
from . import stretches
from .compute import is_fused, module_for
from .drop import Drop
from .ranges import Ranges, ranges_from_keys


class Places(NamedTuple):
    """Where the tokens of queries and keys are, for dropout's masks. int64 tensors on the device."""

    queries: Tensor  # [N]: the place in its row of each of this rank's tokens, as query and as own key
    rows: Tensor  # [N]: the number of each token's row among this rank's rows
    received: Tensor  # [R]: the place in its row of each received key


class VisibleKeys:
    """Which of some keys each query sees, made once for all layers of a model."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._batches: dict[torch.dtype, stretches.Batch] = {}

    @classmethod
    def of(cls, keys: Tensor, count: int) -> VisibleKeys:
        """Of `count` keys. keys: int32 [queries, 2], the first key that each query sees, and the key after the last."""
        return cls(ranges_from_keys(keys.unsqueeze(0), count))

    def to(self, device: torch.device) -> VisibleKeys:
        """The same on a device."""
        return VisibleKeys(Ranges(*(each.to(device) for each in self.ranges)))

    def batch(self, dtype: torch.dtype) -> stretches.Batch:
        """The calls of torch's fused attention on a CPU. dtype: of the queries. The first call reads on the host."""
        if dtype not in self._batches:
            T, S = (each.shape[1] for each in self.ranges)
            self._batches[dtype] = stretches.batch_of(self.ranges.keys, T, S, True, dtype)
        return self._batches[dtype]


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
        """From the first to the last query that sees a received key."""

    @property
    def places(self) -> Places:
        """Where queries and received keys are in their rows."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """The received keys and values, [1, R, kv_heads * D] each: row after row, each in reading order."""

    def return_gradients(self, dkey: Tensor, dvalue: Tensor) -> Callable[[Tensor, Tensor], None]:
        """Starts to send the gradients of received keys and values to their ranks.

        Returns a function that adds what arrives in exchange to the gradients of this rank's own keys and values.
        """


class Options(NamedTuple):
    """The options of one call, and what this rank computes of the global weights [B, heads, T, T]."""

    head_dim: int
    scale: float
    dropout: float
    number: int  # the key of dropout, where no tensor is given
    name: str | None  # from which, with the key, the key of this layer's dropout is derived
    first_row: int  # of this rank's rows
    first_head: int
    heads: int  # in all
    tokens: int  # in all: T

    def drop(self, dropout_key: Tensor | None, places: Places, keys: Tensor, queries: slice) -> Drop | None:
        """Dropout of the weights of some queries for the keys at these places."""
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
    *,
    received: ReceivedKeys,
    **given: Any,
) -> tuple[Tensor, Tensors]:
    """query [B, t, heads * D], key and value [B, t, kv_heads * D] of this rank's tokens -> the output like query.

    given: the fields of `Options`. Saves the operands, the received keys and values, the output and a logsumexp a row
    and head.
    """
    options, places, queries = Options(**given), received.places, received.queries
    q, k, v = (x.reshape(1, -1, x.shape[-1]) for x in (query, key, value))
    drop = options.drop(dropout_key, places, places.queries, slice(None))
    output, lse = attend(q, k, v, received.own, drop, options)
    further_key, further_value = received.wait()
    if further_key.numel() and q.numel():
        drop = options.drop(dropout_key, places, places.received, queries)
        further = attend(q[:, queries], further_key, further_value, received.received, drop, options)
        _merge(output[:, queries], lse[:, :, queries], *further)
    output = output.view(query.shape)
    return output, (query, key, value, dropout_key, further_key, further_value, output, lse)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, received: ReceivedKeys, **given: Any) -> Tensors:
    """The gradients of query, key and value."""
    operands: Any = saved
    query, key, value, dropout_key, further_key, further_value, output, lse = operands
    options, places, queries = Options(**given), received.places, received.queries
    g, q, k, v, out = (x.reshape(1, -1, x.shape[-1]) for x in (grad, query, key, value, output))
    sees = bool(further_key.numel() and q.numel())
    of_received, of_query = (torch.zeros_like(further_key), torch.zeros_like(further_value)), None
    if sees:
        drop = options.drop(dropout_key, places, places.received, queries)
        part = (q[:, queries], further_key, further_value, out[:, queries], lse[:, :, queries])
        of_query, *gradients = attend_backward(g[:, queries], *part, received.received, drop, options)
        of_received = gradients[0], gradients[1]
    finish = received.return_gradients(*of_received)
    drop = options.drop(dropout_key, places, places.queries, slice(None))
    dq, dk, dv = attend_backward(g, q, k, v, out, lse, received.own, drop, options)
    if of_query is not None:
        dq[:, queries] += of_query
    finish(dk[0], dv[0])
    every = (dq.view(query.shape), dk.view(key.shape), dv.view(value.shape), None)
    return tuple([each if need else None for each, need in zip(every, needed, strict=False)])


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys, drop: Drop | None, options: Options
) -> tuple[Tensor, Tensor]:
    """q [1, N, heads * D], k and v [1, S, kv_heads * D] -> the output like q, the logsumexp [1, heads, N]."""
    head_dim, scale = options.head_dim, options.scale
    if not q.numel() or q.is_meta:
        lse = q.new_empty((1, q.shape[-1] // head_dim, q.shape[1]), dtype=torch.promote_types(q.dtype, torch.float32))
        return torch.empty_like(q), lse
    if is_fused(q, plain_scores=drop is None):
        return stretches.forward(q, k, v, visible.batch(q.dtype), None, head_dim=head_dim, scale=scale)
    operands = (q, k, v, visible.ranges, None, drop)
    output, lse = module_for(q).forward(*operands, head_dim=head_dim, scale=scale, softcap=None)
    return output, lse


def attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: VisibleKeys,
    drop: Drop | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; see `attend`. out, lse: over the keys of all parts."""
    head_dim, scale = options.head_dim, options.scale
    if not q.numel() or q.is_meta:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if is_fused(q, plain_scores=drop is None):
        return stretches.backward(g, q, k, v, out, lse, visible.batch(q.dtype), head_dim=head_dim, scale=scale)
    operands = (g, q, k, v, out, lse, visible.ranges, None, drop)
    dq, dk, dv, _ = module_for(q).backward(*operands, head_dim=head_dim, scale=scale, softcap=None)
    return dq, dk, dv


def _merge(output: Tensor, lse: Tensor, further: Tensor, further_lse: Tensor) -> None:
    """Merges a part's output [1, N, heads * D] and logsumexp [1, heads, N] into those of the part before, in place."""
    if output.is_meta:
        return
    total = torch.logaddexp(lse, further_lse)
    heads = lse.shape[1]
    shares = ((each - total).exp_().mT.unsqueeze(-1) for each in (lse, further_lse))  # [1, N, heads, 1]
    parts = (each.reshape(1, -1, heads, each.shape[-1] // heads) * next(shares) for each in (output, further))
    output.copy_((next(parts) + next(parts)).flatten(-2))
    lse.copy_(total)
