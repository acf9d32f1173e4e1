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
    out: Tensor,
    z: Tensor | None,
    activation: str | None = None,
    first: int = 0,
) -> None:
    """a [N, K], b [G, K, M], bias [G, M] -> out [N, M]: the rows of group first + g times b[g], plus bias[g]; then the activation.

    offsets: int32, where each of all groups ends; b has those from `first` on. Rows of other groups are not touched. z: what the
    activation is applied to.
    """
    plain = bias is None and activation is None and out.dtype == a.dtype
    for g, rows in enumerate(_groups(offsets, first, len(b))):
        if plain:
            torch.mm(a[rows], b[g], out=out[rows])
            continue
        added = None if bias is None else bias[g]
        out[rows], of_rows = matmul.product(
            a[rows], b[g], added, activation=activation, out_dtype=out.dtype, keep_z=z is not None
        )
        if z is not None and of_rows is not None:
            z[rows] = of_rows


def weights(a: Tensor, grad: Tensor, offsets: Tensor, out: Tensor, first: int = 0, accumulate: bool = False) -> None:
    """a [N, K], grad [N, M] -> out [G, K, M]: of each group from `first` on, its rows of a, transposed, times those of grad.

    accumulate: they are added to what is in out.
    """
    for g, rows in enumerate(_groups(offsets, first, len(out))):
        if accumulate:
            matmul.accumulate(a[rows].mT, grad[rows], out[g])
        else:
            torch.mm(a[rows].mT, grad[rows], out=out[g])


def _groups(offsets: Tensor, first: int, count: int) -> Iterator[slice]:
    ends: list[int] = offsets.tolist()
    for g in range(first, first + count):
        yield slice(ends[g - 1] if g else 0, ends[g])
