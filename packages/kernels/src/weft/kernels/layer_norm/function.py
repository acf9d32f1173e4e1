"""Layer norm of local tensors, with or without a residual: forward and backward, by the kernels or in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import is_torchs, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import launched
from ..launching.rows import fits
from . import reference


def forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensors]:
    """The layer norm of x, and the saved tensors (x, weight, bias, mean, rstd), as in `reference.forward`."""
    if not _launches(x):
        return reference.forward(x, weight, bias, eps=eps)
    y, _, mean, rstd = _normalized(x, None, weight, bias, eps)
    return y, (x, weight, bias, mean, rstd)


def is_native(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> bool:
    """Whether torch's own layer_norm and its gradient serve as well: for plain CPU tensors with few rows.

    With many rows, torch's running sums for the weight's gradient are less exact: see `reference.ROWS_OF_TORCH`.
    """
    if not is_torchs(x, weight, bias, residual):
        return False
    size = x.shape[-1:]
    of_a_row = (weight is None or weight.shape == size) and (bias is None or bias.shape == size)
    return of_a_row and len(size) == 1 and x.numel() <= reference.ROWS_OF_TORCH * size[0]


def again(saved: Tensors, *, eps: float) -> Tensor:
    """Recomputes the output of `forward` from its saved tensors."""
    x, weight, bias, *_ = saved
    assert x is not None, "forward saves x"
    return forward(x, weight, bias, eps=eps)[0]


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """The gradients of x, weight and bias, as in `reference.backward`."""
    x = saved[0]
    assert x is not None, "forward saves x"
    return _gradients(saved, grad, None, needed) if _launches(x) else reference.backward(saved, grad, needed, eps=eps)


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """(x + residual, the layer norm of this sum). Saves the sum instead of x and residual."""
    if not _launches(x) or x.dtype != residual.dtype:
        plain = x + residual
        y, saved = forward(plain, weight, bias, eps=eps)
        return (plain, y), saved
    y, total, mean, rstd = _normalized(x, residual, weight, bias, eps)
    assert total is not None, "there is a residual"
    return (total, y), (total, weight, bias, mean, rstd)


def add_backward(
    saved: Tensors, grads: tuple[Tensor | None, Tensor | None], needed: Sequence[bool], *, eps: float
) -> Tensors:
    """The gradients of x, residual, weight and bias. x and residual share one: grad_sum plus the norm's gradient."""
    grad_sum, grad = grads
    if grad is None:
        return (*(grad_sum if need else None for need in needed[:2]), None, None)
    total = saved[0]
    assert total is not None, "forward saves the sum"
    wanted = (needed[0] or needed[1], *needed[2:])
    if not _launches(total):
        dx, *others = reference.backward(saved, grad, wanted, eps=eps)
        dx = dx if dx is None or grad_sum is None else dx.add_(grad_sum)
    else:
        dx, *others = _gradients(saved, grad, grad_sum, wanted)
    return dx if needed[0] else None, dx if needed[1] else None, *others


def _launches(x: Tensor) -> bool:
    return use_triton(x) and fits(x, x.shape[-1])


def _normalized(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """By the kernel: (output, x + residual or None, mean, rstd), where rstd is 1 / the standard deviation of a row."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in range(2))
    _forward(x, residual, weight, bias, y, total, mean, rstd, eps)
    return y, total, mean, rstd


def _gradients(saved: Tensors, grad: Tensor, grad_sum: Tensor | None, needed: Sequence[bool]) -> Tensors:
    x, weight, bias, mean, rstd = saved
    assert x is not None, "forward saves x"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight, dbias = (
        None if each is None or not need else torch.empty_like(each)
        for each, need in zip((weight, bias), needed[1:], strict=False)
    )
    _backward(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias


@launched(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, "
    "Tensor(a!) y, Tensor(b!)? total, Tensor(c!) mean, Tensor(d!) rstd, float eps)"
)
def _forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched(
    "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, Tensor(c!)? dbias)"
)
def _backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)
