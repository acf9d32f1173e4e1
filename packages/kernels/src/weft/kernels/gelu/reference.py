"""gelu: x * Phi(x), with the normal distribution function (Hendrycks and Gimpel 2016), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..op import Tensors


def forward(x: Tensor, *, approximate: str = "none") -> tuple[Tensor, Tensors]:
    """x of any shape -> that shape. approximate: "tanh" is the paper's section 2 form, which GPT-2 was trained with."""
    return F.gelu(x, approximate=approximate), (x,)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, approximate: str = "none") -> Tensors:
    """dx = grad * (Phi(x) + x * phi(x)), or the derivative of the approximation; aten's gelu_backward in one pass."""
    (x,) = saved
    assert x is not None, "forward saves it"
    return (torch.ops.aten.gelu_backward(grad, x, approximate=approximate) if needed[0] else None,)
