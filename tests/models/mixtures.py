"""Experts in plain torch, for tests of their transport."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from weft.models.experts import Experts

EXPERTS, CHOSEN, HIDDEN, INSIDE = 8, 3, 16, 12


class PlainExperts(Experts):
    """A loop over the experts."""

    counted = False  # whether the caller has counted the choices of these experts, as an exchange of tokens does

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, rows: int | None = None) -> Tensor:
        """x [..., H], experts [..., k], weights [..., k] -> [..., H]. Numbers outside are of no expert."""
        here = ((experts >= 0) & (experts < self.gate_proj.shape[0])).sum().item()
        assert rows is None or rows == here or (rows > here and not self.counted), (rows, here)
        total = torch.zeros_like(x)
        for e in range(self.gate_proj.shape[0]):
            weight = (weights * (experts == e)).sum(-1, keepdim=True)
            inner = F.silu(x @ self.gate_proj[e].mT) * (x @ self.up_proj[e].mT)
            total = total + weight * (inner @ self.down_proj[e].mT)
        return total
