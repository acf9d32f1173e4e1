"""grouped_matmul of local tensors, forward and backward.

The products are custom ops of torch: where groups end is not known while tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import use_triton
from ..launched import launched
from ..matmul.checks import check_apart
from ..matmul.function import compiles
from ..matmul.reference import derivative
from ..op import Tensors
from . import reference


def forward(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    first: int = 0,
    adds: bool = True,
    keep: bool = True,
) -> tuple[Tensor, Tensors]:
    """The rows of each group times its matrix, as in `reference.forward`; rows in no group of b are zero.

    first: the global number of b's first group.
    adds: whether this rank adds bias and residual; False where the ranks' outputs are summed and another rank adds
    them.
    keep: whether to save z for backward. Saved for backward: a, b, offsets and, with an activation, the
        pre-activation z; for relu without a residual, the output instead of z.
    """
    added = (bias, residual) if adds else (None, None)
    out = torch.zeros((a.shape[0], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
    saves_output = activation == "relu" and residual is None
    z = torch.empty_like(out) if keep and activation is not None and not saves_output else None
    _rows_by_group(a, b, offsets, *added, a_scale, b_scale, out, z, activation, alpha, beta, first)
    # Backward needs only the residual's shape and dtype: save one element, expanded.
    residual_shape = None if residual is None else residual.new_empty(()).expand(residual.shape)
    return out, (a, b, offsets, out if saves_output else z, residual_shape)


def of_products(saved: Tensors, grad: Tensor, needed: Sequence[bool], **options: Any) -> Tensors:
    """dz = grad * act'(z), in the dtype of a; and dresidual = beta * grad, zero in rows behind the last group."""
    a, _, offsets, z, residual = saved
    assert a is not None and offsets is not None, "forward saves the operands"
    dresidual = None
    if needed[4] and residual is not None:
        dresidual = _zeroed_behind_groups(grad, offsets).mul_(options.get("beta", 1.0))
        dresidual = dresidual.sum_to_size(residual.shape).to(residual.dtype)
    dz = grad if z is None else derivative(grad, z, options.get("activation"))
    return dz if a.dtype.itemsize == 1 else dz.to(a.dtype), dresidual


def _zeroed_behind_groups(grad: Tensor, offsets: Tensor) -> Tensor:
    """grad with zeros in the rows behind the last group, computed without waiting for the offsets on the host."""
    if len(offsets) == 0:
        return torch.zeros_like(grad)
    behind = torch.arange(len(grad), device=grad.device) >= offsets[-1]
    return grad.masked_fill(behind[:, None], 0)


def backward(
    saved: Tensors,
    grads: Tensors,
    needed: Sequence[bool],
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    first: int = 0,
    adds: bool = True,
) -> Tensors:
    """The gradients of a, b, bias and residual; offsets and scales have none.

    For each group g: da[rows] = alpha * dz[rows] @ b[g].T, db[g] = alpha * a[rows].T @ dz[rows],
    dbias[g] = dz[rows].sum(0).

    grads: (dz, dresidual), from `of_products`.
    """
    a, b, offsets = saved[:3]
    dz, dresidual = grads
    assert a is not None and b is not None and offsets is not None and dz is not None, "forward saves the operands"
    da = db = dbias = None
    if needed[0]:
        da = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
        _rows_by_group(dz, b.mT, offsets, None, None, None, None, da, None, None, alpha, 1.0, first)
    if needed[1]:
        db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
        _weights_by_group(a, dz, offsets, db, alpha, first, False)
    if needed[3]:
        dbias = torch.empty((len(b), 1, b.shape[-1]), dtype=dz.dtype, device=b.device)
        _weights_by_group(dz.new_ones(len(dz), 1), dz, offsets, dbias, 1.0, first, False)
        dbias = dbias.squeeze(1)
    return da, db, None, dbias, dresidual, None, None


def accumulate(a: Tensor, b: Tensor, offsets: Tensor, into: Tensor, *, first: int = 0) -> tuple[Tensor, Tensors]:
    """into[g] += a[:, rows] @ b[rows] for each group g; a [K, N], b [N, M], into [G, K, M]. Raises as `check_apart`."""
    check_apart("grouped_matmul", into)
    _weights_by_group(a.mT, b, offsets, into, 1.0, first, True)
    return into, ()


@launched(
    "grouped_matmul(Tensor a, Tensor b, Tensor offsets, Tensor? bias, Tensor? residual, Tensor? a_scale, Tensor? "
    "b_scale, Tensor(a!) out, Tensor(b!)? z, str? activation, float alpha, float beta, int first)"
)
def _rows_by_group(a: Tensor, b: Tensor, *operands: Any) -> None:
    if use_triton(a) and (a.dtype.itemsize > 1 or compiles(a, b)):
        from . import launch  # imports triton, which a CPU run may not have

        launch.forward(a, b, *operands)
    else:
        reference.forward(a, b, *operands)


@launched(
    "grouped_matmul_weights(Tensor a, Tensor grad, Tensor offsets, Tensor(a!) out, float alpha, int first, bool "
    "accumulate)"
)
def _weights_by_group(a: Tensor, *operands: Any) -> None:
    if use_triton(a):
        from . import launch

        launch.weights(a, *operands)
    else:
        reference.weights(a, *operands)
