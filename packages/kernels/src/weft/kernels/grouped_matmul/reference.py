"""Products of groups of rows in plain torch: the CPU path, and the kernels' definition. The host reads the offsets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..matmul import reference as matmul


def forward(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    first: int = 0,
) -> None:
    """a [N, K], b [G, K, M] -> out [N, M]: the rows of group first + g times b[g], with epilogue.

    The epilogue is that of `matmul.reference`.
    offsets: int32, the end of every global group. b and bias [G, M] have groups first to first + G - 1; the rows of
        other groups stay as they are in out.
    residual: broadcast to out. a_scale: one number or [N]. b_scale: one number, [G] or [G, M].
    z: receives the pre-activation; None where it is not wanted.
    """
    epilogue = (bias, residual, a_scale, b_scale, activation)
    plain = alpha == 1 and out.dtype == a.dtype and all(each is None for each in epilogue)
    residual = None if residual is None else residual.expand(out.shape)
    for g, rows in enumerate(_groups(offsets, first, len(b))):
        if plain:
            torch.mm(a[rows], b[g], out=out[rows])
            continue
        out[rows], of_rows = matmul.product(
            a[rows], b[g], None if bias is None else bias[g], None if residual is None else residual[rows],
            _scale_at(a_scale, rows), _scale_at(b_scale, g),
            activation=activation, alpha=alpha, beta=beta, out_dtype=out.dtype, keep_z=z is not None,
        )  # fmt: skip
        if z is not None and of_rows is not None:
            z[rows] = of_rows


def _scale_at(scale: Tensor | None, place: slice | int) -> Tensor | None:
    return scale if scale is None or scale.ndim == 0 else scale[place]


def weights(
    a: Tensor,
    grad: Tensor,
    offsets: Tensor,
    out: Tensor,
    alpha: float = 1.0,
    first: int = 0,
    accumulate: bool = False,
) -> None:
    """a [N, K], grad [N, M] -> out [G, K, M]: out[g] = alpha * a[rows].T @ grad[rows], for the rows of group first + g.

    accumulate: add a[rows].T @ grad[rows] to out[g] instead; alpha must be 1.
    """
    for g, rows in enumerate(_groups(offsets, first, len(out))):
        if accumulate:
            matmul.accumulate(a[rows].mT, grad[rows], out[g])
        else:
            torch.addmm(out[g], a[rows].mT, grad[rows], beta=0, alpha=alpha, out=out[g])


def _groups(offsets: Tensor, first: int, count: int) -> Iterator[slice]:
    ends: list[int] = offsets.tolist()
    for g in range(first, first + count):
        yield slice(ends[g - 1] if g else 0, ends[g])
