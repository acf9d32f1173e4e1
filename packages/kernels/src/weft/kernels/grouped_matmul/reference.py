"""Products of groups of rows in plain torch: the CPU path and the meaning. The host reads where the groups end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def forward(a: Tensor, b: Tensor, offsets: Tensor, first: int = 0) -> Tensor:
    """a [N, K], b [G, K, M] -> [N, M]: the rows of group first + g times b[g], zeros for rows of other groups.

    offsets: int32, where each of all groups ends; b has those from `first` on.
    """
    out = a.new_zeros(len(a), b.shape[-1])
    for g, rows in enumerate(_groups(offsets, first, len(b))):
        torch.mm(a[rows], b[g], out=out[rows])
    return out


def weights(a: Tensor, grad: Tensor, offsets: Tensor, first: int, count: int) -> Tensor:
    """a [N, K], grad [N, M] -> [count, K, M]: of each group from `first` on, its rows of a, transposed, times those of grad."""
    out = a.new_empty(count, a.shape[-1], grad.shape[-1])
    for g, rows in enumerate(_groups(offsets, first, count)):
        torch.mm(a[rows].mT, grad[rows], out=out[g])
    return out


def _groups(offsets: Tensor, first: int, count: int) -> Iterator[slice]:
    ends: list[int] = offsets.tolist()
    for g in range(first, first + count):
        yield slice(ends[g - 1] if g else 0, ends[g])
