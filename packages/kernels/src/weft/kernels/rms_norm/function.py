"""RMS norm of local tensors, with or without a residual: x / sqrt(mean(x**2) + eps) * weight.

`forward`, `inference`, `recompute`, `backward` and the `add_` functions choose the code by `_uses_kernel`. Triton
kernels (`_kernel_forward`, `_kernel_backward`) compute on a GPU and in Triton's interpreter. Plain torch (the `plain_`
functions) computes on a CPU, in float64 and for rows too long for a kernel. The plain functions define the result:
Zhang and Sennrich 2019, eq. 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling, on_cpu, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import fits, launched


def forward(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> tuple[Tensor, Tensors]:
    """The RMS norm of x, and the saved tensors (x, weight, rrms), as in `plain_forward`."""
    if not _uses_kernel(x, head_dim):
        return plain_forward(x, weight, eps=eps, head_dim=head_dim)
    y, _, rrms = _kernel_forward(x, None, weight, eps, head_dim)
    return y, (x, weight, rrms)


def inference(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, without saved tensors."""
    if not _uses_kernel(x, head_dim):
        return _plain_inference(x, weight, eps=eps, head_dim=head_dim)
    return _kernel_forward(x, None, weight, eps, head_dim)[0]


def recompute(saved: Tensors, *, eps: float, head_dim: int | None = None) -> Tensor:
    """Recomputes the output of `forward`, or the norm that `add_forward` returns, from the saved tensors."""
    x, weight, rrms = saved
    assert x is not None and rrms is not None, "forward saves x and rrms"
    if not _uses_kernel(x, head_dim):
        return plain_recompute(x, weight, rrms, head_dim=head_dim)
    # The kernel reads x in any case, and recomputes rrms from x: cheaper than to load rrms.
    return _kernel_forward(x, None, weight, eps, head_dim)[0]


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float, head_dim: int | None = None
) -> Tensors:
    """The gradients of x and weight, as in `plain_backward`."""
    x = saved[0]
    assert x is not None, "forward saves x"
    if not _uses_kernel(x, head_dim):
        return plain_backward(saved, grad, needed, eps=eps, head_dim=head_dim)
    return _kernel_backward(saved, grad, None, needed, head_dim)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """(x + residual, the RMS norm of this sum). Saves the sum instead of x and residual."""
    if not _uses_kernel(x, None) or x.dtype != residual.dtype:
        residual_sum = x + residual
        y, saved = forward(residual_sum, weight, eps=eps)
        return (residual_sum, y), saved
    y, total, rrms = _kernel_forward(x, residual, weight, eps, None)
    assert total is not None, "there is a residual"
    return (total, y), (total, weight, rrms)


def add_inference(x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """The outputs of `add_forward`, without saved tensors."""
    launches = _uses_kernel(x, None)
    if not launches or x.dtype != residual.dtype:
        total = x + residual
        return total, (inference if launches else _plain_inference)(total, weight, eps=eps)
    return add_forward(x, residual, weight, eps=eps)[0]


def add_backward(
    saved: Tensors, grads: tuple[Tensor | None, Tensor | None], needed: Sequence[bool], *, eps: float
) -> Tensors:
    """The gradients of x, residual and weight.

    x and residual have the same gradient: grad_sum, the upstream gradient of the sum, plus the norm's gradient.
    """
    grad_sum, grad = grads
    if grad is None:
        return (*(grad_sum if need else None for need in needed[:2]), None)
    total = saved[0]
    assert total is not None, "forward saves the sum"
    wanted = (needed[0] or needed[1], needed[2])
    if not _uses_kernel(total, None):
        dx, dweight = plain_backward(saved, grad, wanted, eps=eps)
        dx = dx if dx is None or grad_sum is None else dx.add_(grad_sum)
    else:
        dx, dweight = _kernel_backward(saved, grad, grad_sum, wanted, None)
    return dx if needed[0] else None, dx if needed[1] else None, dweight


def _uses_kernel(x: Tensor, head_dim: int | None) -> bool:
    return use_triton(x) and fits(x, x.shape[-1] if head_dim is None else head_dim)


def _kernel_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, head_dim: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """By the kernel: (output, x + residual or None, rrms), where rrms is 1 / the root mean square of a row."""
    H = x.shape[-1] if head_dim is None else head_dim
    shape = x.shape[:-1] if head_dim is None else (*x.shape[:-1], x.shape[-1] // H)
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rrms = torch.empty((*shape, 1), dtype=torch.float32, device=x.device)
    _launch_forward(x, residual, weight, y, total, rrms, H, eps)
    return y, total, rrms


def _kernel_backward(
    saved: Tensors, grad: Tensor, grad_sum: Tensor | None, needed: Sequence[bool], head_dim: int | None
) -> Tensors:
    """By the kernel: the gradients of x and weight. grad_sum: a gradient of x to add, or None."""
    x, weight, rrms = saved
    assert x is not None, "forward saves x"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = None if weight is None or not needed[1] else torch.empty_like(weight)
    _launch_backward(grad, grad_sum, x, weight, rrms, dx, dweight, x.shape[-1] if head_dim is None else head_dim)
    return dx, dweight


@launched(
    "rms_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) y, Tensor(b!)? total, Tensor(c!) rrms, SymInt H, "
    "float eps)"
)
def _launch_forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched(
    "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rrms, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, SymInt H)"
)
def _launch_backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)


def plain_forward(
    x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None
) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H] or None -> [..., H]. With head_dim D: x [..., heads * D], weight [D], a norm of each head.

    Normalized in float32 at least, rounded to x's dtype, then multiplied by the weight: as in Hugging Face's Llama
    and, for heads, its Qwen 3.
    """
    rrms = _rrms(_heads(x, head_dim), eps)
    return plain_recompute(x, weight, rrms, head_dim=head_dim), (x, weight, rrms)


def _rrms(heads: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., 1]: 1 / the root mean square of each row, in float32 at least."""
    wide = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    # For a single token, a norm costs the host's calls to torch: vecdot needs the fewest.
    squares: Tensor = torch.linalg.vecdot(wide, wide)
    return squares.div_(heads.shape[-1]).add_(eps).rsqrt_().unsqueeze_(-1)


def plain_recompute(x: Tensor, weight: Tensor | None, rrms: Tensor, *, head_dim: int | None = None) -> Tensor:
    """Computes the output from x, weight and rrms, in `plain_forward`, in `_plain_inference` and again in backward."""
    normal = _heads(x, head_dim) * rrms  # in rrms's dtype, float32 at least
    if normal.dtype != x.dtype:
        normal = normal.to(x.dtype)
    if weight is not None:
        normal = normal.mul_(weight) if weight.dtype == normal.dtype else normal * weight
    return normal if head_dim is None else normal.reshape(x.shape)


def _plain_inference(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> Tensor:
    """The output of `plain_forward`, without saved tensors.

    On a GPU, torch's own rms_norm computes float32 and float64 in one kernel. For other dtypes torch rounds a different
    number of times than `plain_forward`.
    """
    if on_cpu(x) or x.dtype not in (torch.float32, torch.float64) or (weight is not None and weight.dtype != x.dtype):
        return plain_recompute(x, weight, _rrms(_heads(x, head_dim), eps), head_dim=head_dim)
    heads = _heads(x, head_dim)
    output = torch.rms_norm(heads, heads.shape[-1:], weight, eps)
    return output if head_dim is None else output.view(x.shape)


def plain_backward(
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
        grad_normal = wide if weight is None else wide * weight
        total = product.sum(-1) if weight is None else _dot_weight(product, weight)
        mean = total.div_(product.shape[-1]).unsqueeze_(-1)
        dx = torch.addcmul(grad_normal, normal, mean, value=-1).mul_(rrms).to(x.dtype)
        dx = dx if head_dim is None else dx.reshape(x.shape)
    if weight is not None and needed[1]:
        dweight = product.reshape(math.prod(wide.shape[:-1]), wide.shape[-1]).sum(0).to(weight.dtype)
    return dx, dweight


def _dot_weight(product: Tensor, weight: Tensor) -> Tensor:
    """product [..., H], weight [H] -> [...]: the dot product of each row with the weight."""
    if is_compiling():  # autocast is active in the compiled graph, and would round the operands of @
        return (product * weight).sum(-1)
    dot: Tensor = product @ weight.to(product.dtype)  # a CPU multiplies and sums in one pass
    return dot


def _heads(x: Tensor, head_dim: int | None) -> Tensor:
    """[..., heads * D] -> [..., heads, D]; x itself where head_dim is None."""
    return x if head_dim is None else x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
