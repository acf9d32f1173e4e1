"""rms_norm: x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019, eq. 4), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..op import Tensors


def forward(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H] -> [..., H]; with a head_dim D, x [..., heads * D] and weight [D], each head by itself.

    Normalised in float32 at least, rounded to x's dtype, then multiplied by the weight if there is one: as Hugging Face's Llama
    does, and its Qwen 3 for the heads.
    """
    heads = _heads(x, head_dim)  # [..., heads, D]
    wide = heads.to(torch.promote_types(x.dtype, torch.float32))
    rrms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1], one over the root of the mean square
    return again(x, weight, rrms, head_dim=head_dim), (x, weight, rrms)


def again(x: Tensor, weight: Tensor | None, rrms: Tensor, *, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, from what it saves."""
    normal = (_heads(x, head_dim) * rrms).to(x.dtype)  # of float32 at least, as rrms is
    output = normal if weight is None else normal * weight
    return output if head_dim is None else output.reshape(x.shape)


def inference(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, by torch's own function where that rounds as often: one kernel on a GPU."""
    if x.dtype not in (torch.float32, torch.float64) or (weight is not None and weight.dtype != x.dtype):
        return forward(x, weight, eps=eps, head_dim=head_dim)[0]
    heads = _heads(x, head_dim)
    output = torch.rms_norm(heads, heads.shape[-1:], weight, eps)
    return output if head_dim is None else output.view(x.shape)


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float, head_dim: int | None = None
) -> Tensors:
    """With n = x * rrms and g = grad * weight: dx = rrms * (g - n * mean(g * n)), dweight = sum(grad * n)."""
    x, weight, rrms = saved
    assert x is not None and rrms is not None, "forward saves them"
    wide = _heads(grad, head_dim).to(rrms.dtype)
    normal = _heads(x, head_dim) * rrms
    dx = dweight = None
    if needed[0]:
        scaled = wide if weight is None else wide * weight
        mean = (scaled * normal).mean(-1, keepdim=True)
        dx = scaled.addcmul(normal, mean, value=-1).mul_(rrms).to(x.dtype)
        dx = dx if head_dim is None else dx.reshape(x.shape)
    if weight is not None and needed[1]:
        dweight = (wide * normal).reshape(math.prod(wide.shape[:-1]), wide.shape[-1]).sum(0).to(weight.dtype)
    return dx, dweight


def _heads(x: Tensor, head_dim: int | None) -> Tensor:
    """[..., heads * D] -> [..., heads, D]; all of the last dim is one row without a head_dim."""
    return x if head_dim is None else x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
