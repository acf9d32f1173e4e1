"""Whether a token's class is the one of the largest logit: from one more statistic of each shard, at no further pass."""

from __future__ import annotations

import torch
from torch import Tensor


def rival(z: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The logit [n, 1] that the target's must reach to come first among the largest, as torch.argmax has it, in `dtype`.

    That is the largest one of the classes after it, or the next number above the largest one of those before it.
    z: the logits [n, V] of a shard, -inf at the target.  target: its place [n, 1] in the shard, or before or after it.
    """
    is_before = torch.arange(z.shape[1], device=z.device) < target  # [n, V]
    before, largest = (each.amax(-1, keepdim=True).to(dtype) for each in (z.masked_fill(~is_before, -torch.inf), z))
    return torch.where(before == largest, before.nextafter(before.new_full((), torch.inf)), largest)


def correct(statistics: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Of each token 1 where its class is the first of the largest logit, otherwise 0, also where it is ignored; of the target's shape.

    statistics: [shards, N, columns] of all shards, the `rival` last.
    """
    first = statistics[..., 2].sum(0) >= statistics[..., -1].amax(0)
    return (first & (target.reshape(-1).long() != ignore_index)).to(statistics.dtype).view(target.shape)
