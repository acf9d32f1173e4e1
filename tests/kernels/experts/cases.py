"""Mixtures of experts, and each token's experts computed one by one with torch's own functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cases import normal


@dataclass(frozen=True)
class Mixture:
    """The operands of a call, in float64: x [N, H], weights [N, k], gate and up [E, I, H], down [E, H, I]."""

    x: Tensor
    experts: Tensor  # [N, k]
    weights: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    first: int = 0

    @property
    def floats(self) -> tuple[Tensor, ...]:
        return self.x, self.weights, self.gate, self.up, self.down


def mixture(
    tokens: int, hidden: int, inner: int, count: int, choices: int, *, first: int = 0, among: int | None = None
) -> Mixture:
    """A mixture of `count` experts from `first` on. among: how many experts the tokens choose from, by default all."""
    generator = torch.Generator().manual_seed(tokens + hidden)
    scores = torch.rand(tokens, among or count, generator=generator)
    scale = max(1, hidden) ** -0.5
    return Mixture(
        normal(tokens, hidden),
        scores.topk(choices).indices,
        normal(tokens, choices, seed=1).softmax(-1),
        normal(count, inner, hidden, seed=2) * scale,
        normal(count, inner, hidden, seed=3) * scale,
        normal(count, hidden, inner, seed=4) * scale,
        first,
    )


def one_by_one(
    chosen: Tensor, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, first: int = 0
) -> Tensor:
    """The experts one after another on the rows of their tokens, as transformers' layers compute them."""
    out = torch.zeros_like(x)
    for expert in range(len(gate)):
        tokens, choice = torch.where(chosen == first + expert)
        rows = x[tokens]
        y = (F.silu(rows @ gate[expert].mT) * (rows @ up[expert].mT)) @ down[expert].mT
        out = out.index_add(0, tokens, y * weights[tokens, choice, None])
    return out
