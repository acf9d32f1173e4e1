"""Products of groups of rows in plain torch: the CPU path and the meaning. The host reads where the groups end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def forward(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, first: int = 0) -> None:
    """a [N, K], b [G, K, M] -> out [N, M]: the rows of group first + g times b[g]; rows of other groups are not touched.

    offsets: int32, where each of all groups ends; b has those from `first` on.
    """
    for g, rows in enumerate(_groups(offsets, first, len(b))):
        torch.mm(a[rows], b[g], out=out[rows])


def weights(a: Tensor, grad: Tensor, offsets: Tensor, out: Tensor, first: int = 0) -> None:
    """a [N, K], grad [N, M] -> out [G, K, M]: of each group from `first` on, its rows of a, transposed, times those of grad."""
    for g, rows in enumerate(_groups(offsets, first, len(out))):
        torch.mm(a[rows].mT, grad[rows], out=out[g])


def _groups(offsets: Tensor, first: int, count: int) -> Iterator[slice]:
    ends: list[int] = offsets.tolist()
    for g in range(first, first + count):
        yield slice(ends[g - 1] if g else 0, ends[g])
