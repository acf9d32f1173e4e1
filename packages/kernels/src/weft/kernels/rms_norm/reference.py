"""RMS norm in plain torch: x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019, eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling, on_cpu
from ..dispatch.op import Tensors


def forward(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H] or None -> [..., H]. With head_dim D: x [..., heads * D], weight [D], a norm of each head.

    Normalized in float32 at least, rounded to x's dtype, then multiplied by the weight: as in Hugging Face's Llama
    and, for heads, its Qwen 3.
    """
    rrms = _rrms(_heads(x, head_dim), eps)
    return again(x, weight, rrms, head_dim=head_dim), (x, weight, rrms)


def _rrms(heads: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., 1]: 1 / the root mean square of each row, in float32 at least."""
    wide = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    # For a single token, a norm costs the host's calls to torch: vecdot needs the fewest.
    squares: Tensor = torch.linalg.vecdot(wide, wide)
    return squares.div_(heads.shape[-1]).add_(eps).rsqrt_().unsqueeze_(-1)


def again(x: Tensor, weight: Tensor | None, rrms: Tensor, *, head_dim: int | None = None) -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    normal = _heads(x, head_dim) * rrms  # in rrms's dtype, float32 at least
    if normal.dtype != x.dtype:
        normal = normal.to(x.dtype)
    if weight is not None:
        normal = normal.mul_(weight) if weight.dtype == normal.dtype else normal * weight
    return normal if head_dim is None else normal.reshape(x.shape)


def inference(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, without saved tensors.

    On a GPU, torch's own rms_norm computes float32 and float64 in one kernel. For other dtypes torch rounds a different
    number of times than `forward`.
    """
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
    assert x is not None and rrms is not None, "forward saves x and rrms"
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
    """product [..., H], weight [H] -> [...]: the dot product of each row with the weight."""
    if is_compiling():  # autocast is active in the compiled graph, and would round the operands of @
        return (product * weight).sum(-1)
    weighted: Tensor = product @ weight.to(product.dtype)  # a CPU multiplies and sums in one pass
    return weighted


def _heads(x: Tensor, head_dim: int | None) -> Tensor:
    """[..., heads * D] -> [..., heads, D]; x itself where head_dim is None."""
    return x if head_dim is None else x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
