"""Products of groups of rows in plain torch: the CPU path and the meaning. The host reads where the groups end."""

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
    """a [N, K], b [G, K, M] -> out [N, M]: the rows of group first + g times b[g], and what follows as of `matmul`.

    offsets: int32, where each of all groups ends; b has those from `first` on, bias [G, M] too. Rows of other groups are not touched.
    residual: broadcast to out. a_scale: one number or [N]; b_scale: one, [G] or [G, M]. z: what the activation is applied to.
    """
    others = (bias, residual, a_scale, b_scale, activation)
    plain = alpha == 1 and out.dtype == a.dtype and all(each is None for each in others)
    residual = None if residual is None else residual.expand(out.shape)
    for g, rows in enumerate(_groups(offsets, first, len(b))):
        if plain:
            torch.mm(a[rows], b[g], out=out[rows])
            continue
        out[rows], of_rows = matmul.product(
            a[rows], b[g], None if bias is None else bias[g], None if residual is None else residual[rows],
            _of(a_scale, rows), _of(b_scale, g),
            activation=activation, alpha=alpha, beta=beta, out_dtype=out.dtype, keep_z=z is not None,
        )  # fmt: skip
        if z is not None and of_rows is not None:
            z[rows] = of_rows


def _of(scale: Tensor | None, place: slice | int) -> Tensor | None:
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
    """a [N, K], grad [N, M] -> out [G, K, M]: of each group from `first` on alpha times its rows of a, transposed, times those of grad.

    accumulate: they are added to what is in out, with an alpha of 1.
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
