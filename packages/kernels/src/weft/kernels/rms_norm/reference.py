"""rms_norm: x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019, eq. 4), in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend import is_compiling, on_cpu
from ..op import Tensors


def forward(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H] -> [..., H]; with a head_dim D, x [..., heads * D] and weight [D], each head by itself.

    Normalised in float32 at least, rounded to x's dtype, then multiplied by the weight if there is one: as Hugging Face's Llama
    does, and its Qwen 3 for the heads.
    """
    rrms = _rrms(_heads(x, head_dim), eps)
    return again(x, weight, rrms, head_dim=head_dim), (x, weight, rrms)


def _rrms(heads: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., 1], one over the root of each row's mean square, in float32 at least."""
    wide = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    # Of a token alone, what the host asks for is what a norm costs: this asks for the least.
    squares: Tensor = torch.linalg.vecdot(wide, wide)
    return squares.div_(heads.shape[-1]).add_(eps).rsqrt_().unsqueeze_(-1)


def again(x: Tensor, weight: Tensor | None, rrms: Tensor, *, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, from what it saves."""
    normal = _heads(x, head_dim) * rrms  # of float32 at least, as rrms is
    if normal.dtype != x.dtype:
        normal = normal.to(x.dtype)
    if weight is not None:
        normal = normal.mul_(weight) if weight.dtype == normal.dtype else normal * weight
    return normal if head_dim is None else normal.reshape(x.shape)


def inference(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, on a GPU by torch's own function where that rounds as often: one kernel."""
    if on_cpu(x) or x.dtype not in (torch.float32, torch.float64) or (weight is not None and weight.dtype != x.dtype):
        return again(x, weight, _rrms(_heads(x, head_dim), eps), head_dim=head_dim)
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
    product = wide * normal
    dx = dweight = None
    if needed[0]:
        scaled = wide if weight is None else wide * weight
        total = product.sum(-1) if weight is None else _weighted(product, weight)
        mean = total.div_(product.shape[-1]).unsqueeze_(-1)
        dx = torch.addcmul(scaled, normal, mean, value=-1).mul_(rrms).to(x.dtype)
        dx = dx if head_dim is None else dx.reshape(x.shape)
    if weight is not None and needed[1]:
        dweight = product.reshape(math.prod(wide.shape[:-1]), wide.shape[-1]).sum(0).to(weight.dtype)
    return dx, dweight


def _weighted(product: Tensor, weight: Tensor) -> Tensor:
    """[..., H], [H] -> [...], the sums of each row's elements times the weight's."""
    if is_compiling():  # in the region of autocast, which would round the operands of torch's product
        return (product * weight).sum(-1)
    weighted: Tensor = product @ weight.to(product.dtype)  # a CPU multiplies and sums in one pass
    return weighted


def _heads(x: Tensor, head_dim: int | None) -> Tensor:
    """[..., heads * D] -> [..., heads, D]; all of the last dim is one row without a head_dim."""
    return x if head_dim is None else x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
