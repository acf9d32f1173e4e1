"""Experts in plain torch, for tests of their transport."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from weft.models.experts import Experts

EXPERTS, CHOSEN, HIDDEN, INSIDE = 8, 3, 16, 12


class PlainExperts(Experts):
    """A loop over the experts."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, INSIDE, EXPERTS)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [..., H], experts [..., k], weights [..., k] -> [..., H]. Numbers outside are of no expert."""
        total = torch.zeros_like(x)
        for e in range(self.gate_proj.shape[0]):
            weight = (weights * (experts == e)).sum(-1, keepdim=True)
            inner = F.silu(x @ self.gate_proj[e].mT) * (x @ self.up_proj[e].mT)
            total = total + weight * (inner @ self.down_proj[e].mT)
        return total
