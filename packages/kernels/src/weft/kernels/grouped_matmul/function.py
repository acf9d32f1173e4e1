"""grouped_matmul of local tensors, forward and backward. Ops of torch, for where groups end is not known while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import use_triton
from ..launched import launched
from ..matmul.reference import derivative
from ..op import Tensors
from . import reference


def forward(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    first: int = 0,
    add_bias: bool = True,
    keep: bool = True,
) -> tuple[Tensor, Tensors]:
    """See `reference.forward`. Backward needs the factors and, with an activation, z; of relu the output says enough.

    first: of the groups that b has. add_bias: as of `linear`. keep: whether there is a backward.
    """
    bias = bias if add_bias else None
    out = torch.zeros((a.shape[0], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
    z = torch.empty_like(out) if keep and activation not in (None, "relu") else None
    _by_rows(a, b, offsets, bias, out, z, activation, first)
    return out, (a, b, offsets) if activation is None else (a, b, offsets, out if z is None else z)


def of_products(saved: Tensors, grad: Tensor, needed: Sequence[bool], **options: Any) -> Tensor:
    """dz = grad * act'(z), as the products take it."""
    a, _, _, *z = saved
    assert a is not None, "forward saves it"
    return (derivative(grad, z[0], options.get("activation")) if z and z[0] is not None else grad).to(a.dtype)


def backward(
    saved: Tensors,
    dz: Tensor,
    needed: Sequence[bool],
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    first: int = 0,
    add_bias: bool = True,
) -> Tensors:
    """By groups da = dz @ b.T, db = a.T @ dz of the rows of each, and dbias their sum."""
    a, b, offsets = saved[:3]
    assert a is not None and b is not None and offsets is not None, "forward saves them"
    da = db = dbias = None
    if needed[0]:
        da = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
        _by_rows(dz, b.mT, offsets, None, da, None, None, first)
    if needed[1]:
        db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
        _by_groups(a, dz, offsets, db, first, False)
    if len(needed) > 3 and needed[3]:
        dbias = torch.empty((len(b), 1, b.shape[-1]), dtype=b.dtype, device=b.device)
        _by_groups(dz.new_ones(len(dz), 1), dz, offsets, dbias, first, False)
        dbias = dbias.squeeze(1)
    return (da, db, None, dbias)[: len(needed)]


def accumulate(a: Tensor, b: Tensor, offsets: Tensor, into: Tensor, *, first: int = 0) -> tuple[Tensor, Tensors]:
    """into [G, K, M], to which a[:, rows] @ b[rows] was added of each group's rows; a: [K, N], b: [N, M]."""
    _by_groups(a.mT, b, offsets, into, first, True)
    return into, ()


@launched(
    "grouped_matmul(Tensor a, Tensor b, Tensor offsets, Tensor? bias, Tensor(a!) out, Tensor(b!)? z, str? activation, int first)"
)
def _by_rows(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, out: Tensor, z: Tensor | None, activation: str | None, first: int
) -> None:  # fmt: skip
    if use_triton(a):
        from . import launch  # imports triton, which a CPU run may not have

        launch.forward(a, b, offsets, bias, out, z, activation, first)
    else:
        reference.forward(a, b, offsets, bias, out, z, activation, first)


@launched("grouped_matmul_weights(Tensor a, Tensor grad, Tensor offsets, Tensor(a!) out, int first, bool accumulate)")
def _by_groups(a: Tensor, grad: Tensor, offsets: Tensor, out: Tensor, first: int, accumulate: bool) -> None:
    if use_triton(a):
        from . import launch

        launch.weights(a, grad, offsets, out, first, accumulate)
    else:
        reference.weights(a, grad, offsets, out, first, accumulate)
