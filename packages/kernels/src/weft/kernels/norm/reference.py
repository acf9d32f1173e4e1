"""rms_norm: x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019, eq. 4), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..op import Tensors


def forward(x: Tensor, weight: Tensor | None, *, eps: float) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H] -> [..., H].

    Normalised in float32 at least, rounded to x's dtype, then multiplied by the weight if there is one: as Hugging Face's Llama
    does.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rrms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1], one over the root of the mean square
    normal = (wide * rrms).to(x.dtype)
    return normal if weight is None else normal * weight, (x, weight, rrms)


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """With n = x * rrms and g = grad * weight: dx = rrms * (g - n * mean(g * n)), dweight = sum(grad * n)."""
    x, weight, rrms = saved
    assert x is not None and rrms is not None, "forward saves them"
    wide = grad.to(rrms.dtype)
    normal = x * rrms
    dx = dweight = None
    if needed[0]:
        scaled = wide if weight is None else wide * weight
        mean = (scaled * normal).mean(-1, keepdim=True)
        dx = scaled.addcmul(normal, mean, value=-1).mul_(rrms).to(x.dtype)
    if weight is not None and needed[1]:
        dweight = (wide * normal).reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0).to(weight.dtype)
    return dx, dweight
