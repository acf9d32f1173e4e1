"""Tokens drawn from a model, one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import uniform
from weft.mesh import Shard, derive_key
from weft.reshard import layout_of, to_global
from weft.reshard.running.dtensor import wrap


def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """tokens [B, T] -> [B, T + max_new_tokens]: the prompt, and the tokens that the model puts after it.

    Every new token runs the whole context, cropped to the model's max_seq_len: no keys or values are kept.
    temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
    top_k: draw among the k likeliest alone.
    seed: a draw is a function of (seed, sequence, position), the same on every rank and mesh.
    Communication: the model's own, and for parallel logits a gather of the last position's, each token.
    Raises ValueError for an empty prompt or an option out of range.
    """
    _check(tokens, max_new_tokens, temperature, top_k)
    config: Any = model.config
    with torch.no_grad():
        for _ in range(max_new_tokens):
            logits = _last(model(tokens[:, -config.max_seq_len :]))  # [B, V]
            chosen = _pick(logits, temperature, top_k, derive_key(seed, "generate", tokens.shape[1]))
            tokens = torch.cat((tokens, chosen.to(tokens).unsqueeze(1)), 1)
    return tokens


def _last(logits: Tensor) -> Tensor:
    """[B, T, V], in any layout -> the last position's, whole: [B, V]."""
    if isinstance(logits, DTensor):
        layout = layout_of(logits)
        if Shard(1) not in layout.placements:  # every rank has its part of the last position: gather no more
            B, _, V = logits.shape
            logits = wrap(logits.to_local()[:, -1:].contiguous(), layout, (B, 1, V))
        logits = to_global(logits)
    return logits[:, -1]


def _pick(logits: Tensor, temperature: float, top_k: int | None, key: int) -> Tensor:
    """[B, V] -> [B]: the likeliest, or the first whose cumulative probability passes a uniform number."""
    if temperature == 0:
        return logits.argmax(-1)
    scaled = logits.double() / temperature
    size = scaled.shape[-1] if top_k is None else min(top_k, scaled.shape[-1])
    values, candidates = scaled.topk(size, -1)  # [B, size], likeliest first
    cumulative = values.softmax(-1).cumsum(-1)
    drawn = uniform((len(logits), 1), key, device=logits.device).double()
    place = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=size - 1)
    return candidates.gather(1, place).squeeze(1)


def _check(tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"generate takes tokens [B, T] with T >= 1, got shape {tuple(tokens.shape)}; give a prompt")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be >= 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be >= 0, and 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be >= 1, or None for all tokens")
