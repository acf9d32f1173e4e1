"""The layers that models are made of: torch's own modules, computed by Weft's ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from weft import kernels


class Linear(nn.Linear):
    """nn.Linear whose parameters are left unset: `initialize` or a checkpoint fills them, once."""

    def reset_parameters(self) -> None:
        """Nothing: the values come later."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return kernels.linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding whose table is left unset: `initialize` or a checkpoint fills it, once."""

    def reset_parameters(self) -> None:
        """Nothing: the values come later."""

    def forward(self, input: Tensor) -> Tensor:
        """tokens [...] -> [..., embedding_dim]"""
        return kernels.embedding(input, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the last dim; its weight is left unset, as the other layers' are."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return kernels.rms_norm(input, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
