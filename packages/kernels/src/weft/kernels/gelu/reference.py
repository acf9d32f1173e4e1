"""gelu: x * Phi(x), with the normal distribution function (Hendrycks and Gimpel 2016), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x of any shape -> that shape. approximate: "tanh" is the paper's section 2 form, which GPT-2 was trained with."""
    return F.gelu(x, approximate=approximate)


def backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """dx = grad * (Phi(x) + x * phi(x)), or the derivative of the approximation; aten's gelu_backward in one pass."""
    dx: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return dx
