"""RMS norm of local tensors, with or without a residual: forward and backward, by the kernels or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..launching.rows import fits
from . import reference


def forward(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> tuple[Tensor, Tensors]:
    """The RMS norm of x, and the saved tensors (x, weight, rrms), as in `reference.forward`."""
    if not _launches(x, head_dim):
        return reference.forward(x, weight, eps=eps, head_dim=head_dim)
    y, _, rrms = _normalized(x, None, weight, eps, head_dim)
    return y, (x, weight, rrms)


def inference(x: Tensor, weight: Tensor | None, *, eps: float, head_dim: int | None = None) -> Tensor:
    """The output of `forward`, without saved tensors."""
    if not _launches(x, head_dim):
        return reference.inference(x, weight, eps=eps, head_dim=head_dim)
    return _normalized(x, None, weight, eps, head_dim)[0]


def again(saved: Tensors, *, eps: float, head_dim: int | None = None) -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    x, weight, rrms = saved
    assert x is not None and rrms is not None, "forward saves x and rrms"
    if not _launches(x, head_dim):
        return reference.again(x, weight, rrms, head_dim=head_dim)
    return _normalized(x, None, weight, eps, head_dim)[
        0
    ]  # the kernel recomputes rrms: reading it would not save reading x


def backward(
    saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float, head_dim: int | None = None
) -> Tensors:
    """The gradients of x and weight, as in `reference.backward`."""
    x = saved[0]
    assert x is not None, "forward saves x"
    if not _launches(x, head_dim):
        return reference.backward(saved, grad, needed, eps=eps, head_dim=head_dim)
    return _gradients(saved, grad, None, needed, head_dim)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """(x + residual, the RMS norm of this sum). Saves the sum instead of x and residual."""
    if not _launches(x, None) or x.dtype != residual.dtype:
        plain = x + residual
        y, saved = forward(plain, weight, eps=eps)
        return (plain, y), saved
    y, total, rrms = _normalized(x, residual, weight, eps, None)
    assert total is not None, "there is a residual"
    return (total, y), (total, weight, rrms)


def add_inference(x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """The outputs of `add_forward`, without saved tensors."""
    launches = _launches(x, None)
    if not launches or x.dtype != residual.dtype:
        total = x + residual
        return total, (inference if launches else reference.inference)(total, weight, eps=eps)
    return add_forward(x, residual, weight, eps=eps)[0]


def add_backward(
    saved: Tensors, grads: tuple[Tensor | None, Tensor | None], needed: Sequence[bool], *, eps: float
) -> Tensors:
    """The gradients of x, residual and weight. x and residual share one: grad_sum plus the norm's gradient."""
    grad_sum, grad = grads
    if grad is None:
        return (*(grad_sum if need else None for need in needed[:2]), None)
    total = saved[0]
    assert total is not None, "forward saves the sum"
    wanted = (needed[0] or needed[1], needed[2])
    if not _launches(total, None):
        dx, dweight = reference.backward(saved, grad, wanted, eps=eps)
        dx = dx if dx is None or grad_sum is None else dx.add_(grad_sum)
    else:
        dx, dweight = _gradients(saved, grad, grad_sum, wanted, None)
    return dx if needed[0] else None, dx if needed[1] else None, dweight


def _launches(x: Tensor, head_dim: int | None) -> bool:
    return use_triton(x) and fits(x, x.shape[-1] if head_dim is None else head_dim)


def _normalized(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, head_dim: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """By the kernel: (output, x + residual or None, rrms), where rrms is 1 / the root mean square of a row."""
    H = x.shape[-1] if head_dim is None else head_dim
    shape = x.shape[:-1] if head_dim is None else (*x.shape[:-1], x.shape[-1] // H)
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rrms = torch.empty((*shape, 1), dtype=torch.float32, device=x.device)
    _forward(x, residual, weight, y, total, rrms, H, eps)
    return y, total, rrms


def _gradients(
    saved: Tensors, grad: Tensor, grad_sum: Tensor | None, needed: Sequence[bool], head_dim: int | None
) -> Tensors:
    x, weight, rrms = saved
    assert x is not None, "forward saves x"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = None if weight is None or not needed[1] else torch.empty_like(weight)
    _backward(grad, grad_sum, x, weight, rrms, dx, dweight, x.shape[-1] if head_dim is None else head_dim)
    return dx, dweight


@launched(
    "rms_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) y, Tensor(b!)? total, Tensor(c!) rrms, SymInt H, "
    "float eps)"
)
def _forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched(
    "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rrms, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, SymInt H)"
)
def _backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)
