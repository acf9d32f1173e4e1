"""Attention of local tensors: softmax(query @ key.T * scale) @ value, per head.

All functions run plain torch on every device. torch's `scaled_dot_product_attention` chooses its fused kernels itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch.token_order import Runs, as_read
from ..dropout import function as dropping
from ..random.part import Part


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    dropout_key: Tensor | None = None,
    *,
    head_dim: int,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    number: int = 0,
    name: str | None = None,
    first: int | None = None,
    part: Part | None = None,
) -> Tensor:
    """query [..., T, heads * D], key and value [..., S, kv_heads * D], documents [..., S] -> [..., T, heads * D].

    Grouped queries: heads is a multiple of kv_heads, and query head h reads key head h // (heads // kv_heads).
    first: index of the key with the same token as query 0; None means S - T, so the last query and the last key match.
    causal: a query sees the keys up to its own token's. window: a query sees at most the last `window` of these.
    documents: a query sees the keys of its own document only. scale: None means 1 / sqrt(D).
    dropout: the share of attention weights set to zero. The key is `dropout_key`, or `number` where that is None,
        combined with `name` as in `dropout.function`.
    part: which box of the global attention weights [..., heads, T, S] this rank computes; None means all.

    torch differentiates this function. It saves the inputs, the output and one logsumexp a row, as torch's attention
    does; with dropout it saves the attention weights.
    """
    if query.numel() == 0 or key.numel() == 0:
        # torch's attention rejects empty tensors; this output still depends on all three inputs in the graph.
        return query * 0 + 0 * (key.sum() + value.sum())
    T, S = query.shape[-2], key.shape[-2]
    first = S - T if first is None else first
    own = None if documents is None else documents[..., first : first + T]
    start = 0 if window is None else max(0, first - window + 1)
    stop = first + T if causal else S
    if stop - start < S:  # no query sees a key outside start to stop
        key, value = key[..., start:stop, :], value[..., start:stop, :]
        documents = None if documents is None else documents[..., start:stop]
    q, k, v = (_heads(x, head_dim) for x in (query, key, value))  # [B, heads, T, D], twice [B, kv_heads, S, D]
    # The causal mask alone decides which keys are seen.
    causal_only = causal and documents is None and (window is None or window >= stop - start)
    triangle = causal_only and stop - start == T
    mask: Tensor | None = None
    if causal_only and T > 1 and q.is_cuda and not triangle and not dropout:
        from torch.nn.attention.bias import causal_lower_right  # imported late: it imports Dynamo and Triton

        mask = causal_lower_right(T, stop - start)  # fused attention computes this mask without storing it
    elif not triangle or dropout:
        mask = _visible(T, stop - start, first - start, causal, window, own, documents, q.device)
    if not dropout:
        output = _attend(q, k, v, mask, triangle, scale)
    else:
        here = Part.of((*query.shape[:-2], q.shape[1], T, S)) if part is None else part
        here = Part(here.offset + start, (*here.sizes[:-1], stop - start), here.strides)
        ones = torch.ones(here.sizes, dtype=q.dtype, device=q.device)
        drawn, _ = dropping.forward(ones, dropout_key, p=dropout, number=number, name=name, part=here)
        output = _attend_with_dropout(q, k, v, mask, drawn != 0, scale, dropping.quantized(dropout)[1])
    return output.transpose(1, 2).reshape(query.shape)


def forward_in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    dropout_key: Tensor | None = None,
    *,
    order: Runs,
    queries: Runs | None = None,
    parts: tuple[Part, ...] | None = None,
    **options: Any,
) -> Tensor:
    """`forward` on tokens stored in another order than the sequence's: one `forward` for each run of queries.

    order: the stored order of the tokens of query, key, value and documents, as runs [start, stop) of the sequence.
    queries: the runs of this rank's queries; None means all of `order`.
    parts: for each run of queries, which box of the global attention weights [..., heads, T, S] it is, with rows and
        columns in the sequence's order; None means the run's rows in full.
    """
    key, value = as_read(key, order, -2), as_read(value, order, -2)
    documents = None if documents is None else as_read(documents, order, -1)
    queries = order if queries is None else queries
    if parts is None:
        heads, S = query.shape[-1] // options["head_dim"], key.shape[-2]
        weights = (*query.shape[:-2], heads, S, S)
        parts = tuple([part_of_rows(weights, start, stop) for start, stop in queries])
    pieces = torch.split(query, [stop - start for start, stop in queries], -2) if queries else ()
    outputs = [
        forward(piece, key, value, documents, dropout_key, first=start, part=part, **options)
        for piece, (start, _), part in zip(pieces, queries, parts, strict=True)
    ]
    return torch.cat(outputs, -2) if outputs else forward(query, key, value, first=0, **options)


def part_of_rows(weights: tuple[int, ...], start: int, stop: int) -> Part:
    """The box of rows `start` to `stop` within attention weights of shape `weights`, [..., heads, T, S]."""
    *lead, _, S = weights
    return Part.of(weights, (*(slice(0, size) for size in lead), slice(start, stop), slice(0, S)))


def forward_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    documents: Tensor | None = None,
    *,
    length: int,
    head_dim: int,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of new tokens to the cached tokens and to each other; the new keys and values are written to the cache.

    query, key, value: of the new tokens.
    keys, values: the cache, [..., capacity, kv_heads * D], of which the first `length` tokens are filled.
    documents: [..., capacity]; only the entries of cached and new tokens are read.
    """
    new = key.shape[-2]
    keys.narrow(-2, length, new).copy_(key)
    values.narrow(-2, length, new).copy_(value)
    stop = length + new
    if new == 1 and documents is None and keys.numel():  # the last token sees the whole cache: no mask is needed
        start = 0 if window is None else max(0, stop - window)
        k, v = (_heads(x.narrow(-2, start, stop - start), head_dim) for x in (keys, values))
        return _attend(_heads(query, head_dim), k, v, None, False, scale).transpose(1, 2).reshape(query.shape)
    documents = None if documents is None else documents.narrow(-1, 0, stop)
    cached = keys.narrow(-2, 0, stop), values.narrow(-2, 0, stop)
    return forward(query, *cached, documents, head_dim=head_dim, causal=causal, scale=scale, window=window)


def _visible(
    T: int,
    S: int,
    first: int,
    causal: bool,
    window: int | None,
    own: Tensor | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """The mask of which keys each query sees, bool [T, S] or [B, 1, T, S]; None where every query sees every key.

    first: query t and key first + t have the same token. own: the queries' documents.
    """
    mask = None
    if causal and (first < S - 1 or (window is not None and window < first + T)):
        mask = torch.ones(T, S, dtype=torch.bool, device=device).tril_(first)
        if window is not None:
            mask = mask.triu_(first - window + 1)
    if documents is not None:
        assert own is not None, "the caller slices the queries' documents"
        same_document = (own.unsqueeze(-1) == documents.unsqueeze(-2)).reshape(-1, 1, T, S)
        mask = same_document if mask is None else same_document & mask
    return mask


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, triangle: bool, scale: float | None) -> Tensor:
    if q.is_meta:
        attended: Tensor = _MetaAttention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
        return attended
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # CUDA's fused attention for float32 supports no grouped queries; with enable_gqa torch would run an unfused
        # one.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=triangle, scale=scale, enable_gqa=grouped)


class _MetaAttention(torch.autograd.Function):
    """Attention on the meta device, with the saved tensors of fused attention.

    torch's own attention on the meta device is the unfused one, which saves the attention weights for backward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        B, heads, T, D = q.shape
        output = q.new_empty(B, T, heads, D).transpose(1, 2)
        ctx.save_for_backward(q, k, v, mask, output, q.new_empty(B, heads, T, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(torch.empty_like(each) for each in ctx.saved_tensors[:3]), None


def _attend_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor, scale: float | None, factor: float
) -> Tensor:
    """Attention with dropout: weights are multiplied by `factor` where `keep` is true, and set to zero elsewhere."""
    B, heads, T, D = q.shape
    q = q.view(B, k.shape[1], heads // k.shape[1], T, D)  # [B, kv_heads, groups, T, D]
    scores = q * (D**-0.5 if scale is None else scale) @ k.unsqueeze(2).mT  # [B, kv_heads, groups, T, S]
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.ndim == 2 else mask.unsqueeze(1)), -float("inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights.masked_fill(~keep.view(scores.shape), 0) * factor
    return (weights.to(v.dtype) @ v.unsqueeze(2)).view(B, heads, T, D)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., T, heads * D] -> [B, heads, T, D]"""
    return x.reshape(-1, x.shape[-2], x.shape[-1] // head_dim, head_dim).transpose(1, 2)
