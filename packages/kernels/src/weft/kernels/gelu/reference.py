"""GELU in plain torch: x * Phi(x), where Phi is the normal distribution function (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x), of x's shape. approximate: "none", or "tanh" for the form in section 2 of the paper, as GPT-2 uses."""
    return F.gelu(x, approximate=approximate)


def backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """dx = grad * (Phi(x) + x * phi(x)), or the tanh form's derivative; one pass, by aten's gelu_backward."""
    dx: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return dx
