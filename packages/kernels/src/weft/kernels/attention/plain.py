"""Attention that is causal with as many queries as keys, or of all keys, by torch's own differentiable function.

torch's `scaled_dot_product_attention` chooses its fused kernel by the device and the dtype, and saves the operands, the
output and a logsumexp a row and head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def is_plain(query: Tensor, key: Tensor, causal: bool, window: int | None, *further_options: object) -> bool:
    """Whether causality alone says which keys are seen, as torch's fused attention understands it.

    further_options: options, of which any that is not None asks for more.
    """
    for each in further_options:
        if each is not None:
            return False
    T, S = query.shape[-2], key.shape[-2]
    if not query.numel() or not key.numel() or (window is not None and window < S):
        return False
    return T == S or T == 1 or not causal


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: None,
    head_dim: int,
    causal: bool = True,
    scale: float | None = None,
    first: int | None = None,
) -> Tensor:
    """query [..., T, heads * D], key and value [..., S, kv_heads * D] -> [..., T, heads * D]

    more, first: what a layout rule passes to attention that is not plain.
    """
    q, k, v = _heads(query, head_dim), _heads(key, head_dim), _heads(value, head_dim)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # CUDA's fused attention for float32 knows no grouped queries; with enable_gqa torch would run an unfused one.
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    triangle = causal and q.shape[2] == k.shape[2]
    attended = scaled_dot_product_attention(q, k, v, is_causal=triangle, scale=scale, enable_gqa=groups > 1)
    return attended.transpose(1, 2).reshape(query.shape)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., T, heads * D] -> [B, heads, T, D]"""
    return x.reshape(-1, x.shape[-2], x.shape[-1] // head_dim, head_dim).transpose(1, 2)
