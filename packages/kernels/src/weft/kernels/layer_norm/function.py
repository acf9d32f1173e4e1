"""Layer norm of local tensors, with or without a residual: (x - mean) / sqrt(variance + eps) * weight + bias.

`forward`, `recompute`, `backward` and the `add_` functions choose the code by `_uses_kernel`. Triton kernels
(`_kernel_forward`, `_kernel_backward`) compute on a GPU and in Triton's interpreter. Plain torch (the `plain_`
functions) computes on a CPU, in float64 and for rows too long for a kernel. It defines the result: Ba et al. 2016,
eq. 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend import is_compiling, runs_natively, use_triton
from ..dispatch.op import Tensors
from ..launching.launched import fits, launched

WantedGradients = tuple[bool, ...]  # whether the gradients of x, weight and bias are needed
# Up to ROWS_OF_TORCH rows, the running sums in torch's layer_norm backward err by at most 2e-6. More rows are
# computed in pieces: of at most ROWS_AT_ONCE rows, for sums nearly as exact as torch.sum's pairwise ones, and of at
# most ELEMENTS_AT_ONCE elements, to stay in a core's cache.
ROWS_OF_TORCH, ROWS_AT_ONCE, ELEMENTS_AT_ONCE = 2048, 512, 2**18


def forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensors]:
    """The layer norm of x, and the saved tensors (x, weight, bias, mean, rstd), as in `plain_forward`."""
    if not _uses_kernel(x):
        return plain_forward(x, weight, bias, eps=eps)
    y, _, mean, rstd = _kernel_forward(x, None, weight, bias, eps)
    return y, (x, weight, bias, mean, rstd)


def is_native(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None) -> bool:
    """Whether torch's own layer_norm and its gradient serve as well: for plain CPU tensors with few rows.

    With many rows, torch's running sums for the weight's gradient are less exact: see `ROWS_OF_TORCH`.
    """
    if not runs_natively(x, weight, bias, residual):
        return False
    size = x.shape[-1:]
    fit_a_row = (weight is None or weight.shape == size) and (bias is None or bias.shape == size)
    return fit_a_row and len(size) == 1 and x.numel() <= ROWS_OF_TORCH * size[0]


def recompute(saved: Tensors, *, eps: float) -> Tensor:
    """Recomputes the layer norm from the tensors saved by `forward`, or by `add_forward`, whose first is the sum."""
    x, weight, bias, *_ = saved
    assert x is not None, "forward saves x"
    return forward(x, weight, bias, eps=eps)[0]


def backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """The gradients of x, weight and bias, as in `plain_backward`."""
    x = saved[0]
    assert x is not None, "forward saves x"
    return (
        _kernel_backward(saved, grad, None, needed) if _uses_kernel(x) else plain_backward(saved, grad, needed, eps=eps)
    )


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[tuple[Tensor, Tensor], Tensors]:
    """(x + residual, the layer norm of this sum). Saves the sum instead of x and residual."""
    if not _uses_kernel(x) or x.dtype != residual.dtype:
        residual_sum = x + residual
        y, saved = forward(residual_sum, weight, bias, eps=eps)
        return (residual_sum, y), saved
    y, total, mean, rstd = _kernel_forward(x, residual, weight, bias, eps)
    assert total is not None, "there is a residual"
    return (total, y), (total, weight, bias, mean, rstd)


def add_backward(
    saved: Tensors, grads: tuple[Tensor | None, Tensor | None], needed: Sequence[bool], *, eps: float
) -> Tensors:
    """The gradients of x, residual, weight and bias.

    grads: the upstream gradients of the two outputs, the sum and the norm; None stands for zeros.
    x and residual have the same gradient: that of the sum, plus the gradient that comes through the norm.
    """
    grad_sum, grad = grads
    if grad is None:
        return (*(grad_sum if need else None for need in needed[:2]), None, None)
    total = saved[0]
    assert total is not None, "forward saves the sum"
    wanted = (needed[0] or needed[1], *needed[2:])
    if not _uses_kernel(total):
        dx, *dparameters = plain_backward(saved, grad, wanted, eps=eps)
        dx = dx if dx is None or grad_sum is None else dx.add_(grad_sum)
    else:
        dx, *dparameters = _kernel_backward(saved, grad, grad_sum, wanted)
    return dx if needed[0] else None, dx if needed[1] else None, *dparameters


def _uses_kernel(x: Tensor) -> bool:
    return use_triton(x) and fits(x, x.shape[-1])


def _kernel_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """By the kernel: (output, x + residual or None, mean, rstd), where rstd is 1 / the standard deviation of a row."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in range(2))
    _launch_forward(x, residual, weight, bias, y, total, mean, rstd, eps)
    return y, total, mean, rstd


def _kernel_backward(saved: Tensors, grad: Tensor, grad_sum: Tensor | None, needed: Sequence[bool]) -> Tensors:
    """By the kernel: the gradients of x, weight and bias. grad_sum: a gradient of x to add, or None."""
    x, weight, bias, mean, rstd = saved
    assert x is not None, "forward saves x"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight, dbias = (
        None if each is None or not need else torch.empty_like(each)
        for each, need in zip((weight, bias), needed[1:], strict=False)
    )
    _launch_backward(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias


@launched(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, "
    "Tensor(a!) y, Tensor(b!)? total, Tensor(c!) mean, Tensor(d!) rstd, float eps)"
)
def _launch_forward(*arguments: Any) -> None:
    from . import launch  # imports triton, which a CPU run may not have

    launch.forward(*arguments)


@launched(
    "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "Tensor(a!)? dx, Tensor(b!)? dweight, Tensor(c!)? dbias)"
)
def _launch_backward(*arguments: Any) -> None:
    from . import launch

    launch.backward(*arguments)


def plain_forward(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensors]:
    """x [..., H], weight [H], bias [H] -> [..., H]; in float32 at least, then rounded to x's dtype, as torch does."""
    wide = _wide(x)
    scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    output, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], scale, shift, eps)  # mean, rstd [..., 1]
    return output.to(x.dtype), (x, weight, bias, mean, rstd)


def plain_backward(saved: Tensors, grad: Tensor, needed: Sequence[bool], *, eps: float) -> Tensors:
    """The gradients of x, weight and bias, in plain torch; None where not needed.

    dweight = sum(grad * n) and dbias = sum(grad) over all rows, where n = (x - mean) * rstd. dx is computed by aten,
    in a single pass over x.
    """
    x, weight, bias, mean, rstd = saved
    assert x is not None and mean is not None and rstd is not None, "forward saves x, mean and rstd"
    sums = tuple(each is not None and need for each, need in zip((weight, bias), needed[1:], strict=False))
    wide, upstream = _wide(x), grad.to(mean.dtype)
    scale, shift = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    operands, wanted = (upstream, wide, mean, rstd), (needed[0], *sums)
    if not any(sums) or (not is_compiling() and (x.is_meta or x.numel() <= ROWS_OF_TORCH * x.shape[-1])):
        dx, *totals = _compute_by_aten(*operands, scale, shift, wanted)
    elif is_compiling():
        dx = _compute_by_aten(*operands, scale, shift, (needed[0], False, False))[0]
        totals = _sum_fused(*map(_rows, operands))
    else:
        dx, *totals = _compute_in_pieces(*operands, scale, shift, wanted)
    return None if dx is None else dx.to(x.dtype), *(
        total.to(each.dtype) if total is not None and each is not None and need else None
        for total, each, need in zip(totals, (weight, bias), sums, strict=False)
    )


def _compute_by_aten(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: WantedGradients,
) -> list[Tensor | None]:
    """The wanted gradients of x, weight and bias by aten, which sums over rows with a running sum."""
    gradients = torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, bias, wanted)
    return [each if want else None for each, want in zip(gradients, wanted, strict=True)]


def _compute_in_pieces(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: WantedGradients,
) -> list[Tensor | None]:
    """`_compute_by_aten` for many rows: by pieces, then summed. A single running sum would lose the last digits."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    rows = max(1, min(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // x.shape[-1]))
    sums_of_pieces: list[list[Tensor | None]] = []
    for start in range(0, math.prod(x.shape[:-1]), rows):
        piece_grad, piece_x, piece_mean, piece_rstd = (
            _rows(each)[start : start + rows] for each in (grad, x, mean, rstd)
        )
        piece_dx, *sums = _compute_by_aten(piece_grad, piece_x, piece_mean, piece_rstd, weight, bias, wanted)
        if dx is not None and piece_dx is not None:
            _rows(dx)[start : start + rows] = piece_dx
        sums_of_pieces.append(sums)
    totals = zip(zip(*sums_of_pieces, strict=True), wanted[1:], strict=True)
    return [dx, *(torch.stack(each).sum(0) if want else None for each, want in totals)]


def _sum_fused(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor | None]:
    """[dweight, dbias] for a compiler, which fuses both into one pass; the number of rows may be symbolic."""
    return [((x - mean) * rstd * grad).sum(0), grad.sum(0)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1, which is ambiguous for an empty x
