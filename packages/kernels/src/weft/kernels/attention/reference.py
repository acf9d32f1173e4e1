"""attention: softmax(query @ key.T * scale) @ value, per head, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, causal: bool = True, scale: float | None = None
) -> Tensor:
    """query [..., T, heads * D], key and value [..., S, kv_heads * D] -> [..., T, heads * D].

    Grouped queries: heads is a multiple of kv_heads, and head h reads the keys of kv head h // (heads // kv_heads).
    causal: token t sees keys up to S - T + t, so the last query sees every key (a cache holds the first S - T).
    scale: 1 / sqrt(D) where None.
    Torch differentiates it, and keeps for that what its own attention keeps: the inputs, the output and a logsumexp a row.
    Raises ValueError where the widths or lengths do not fit.
    """
    _check(query, key, value, head_dim, causal)
    return _attend(query, key, value, head_dim, causal, scale)


def _check(query: Tensor, key: Tensor, value: Tensor, head_dim: int, causal: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, head_dim {head_dim}"
    if key.shape != value.shape or query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"attention: the shapes do not fit: {shapes}; key and value have one shape, and query's leading dims"
        )
    heads, kv_heads = query.shape[-1] // head_dim, key.shape[-1] // head_dim
    if query.shape[-1] % head_dim or key.shape[-1] % head_dim or (heads % kv_heads if kv_heads else heads):
        raise ValueError(
            f"attention: the widths do not fit: {shapes}; query's is a multiple of key's, and both of head_dim"
        )
    if causal and query.shape[-2] > key.shape[-2]:
        raise ValueError(f"attention: causal needs at least as many keys as queries: {shapes}; give the missing keys")


def _attend(query: Tensor, key: Tensor, value: Tensor, head_dim: int, causal: bool, scale: float | None) -> Tensor:
    if query.numel() == 0 or key.numel() == 0:
        return query * 0 + 0 * (key.sum() + value.sum())  # torch's attention takes no empty tensors; the graph stays
    q, k, v = (_heads(x, head_dim) for x in (query, key, value))  # [B, heads, T, D], twice [B, kv_heads, S, D]
    T, S = q.shape[-2], k.shape[-2]
    mask = None
    if causal and 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # Of CUDA's fused attentions, the one for float32 takes no groups: with enable_gqa torch would run unfused.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and T == S, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2).reshape(query.shape)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., T, heads * D] -> [B, heads, T, D]"""
    return x.reshape(-1, x.shape[-2], x.shape[-1] // head_dim, head_dim).transpose(1, 2)
