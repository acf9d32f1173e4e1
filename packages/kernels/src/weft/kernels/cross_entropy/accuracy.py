"""Whether a token's class has the largest logit. Each shard computes one more statistic for it, and no further pass is needed."""

from __future__ import annotations

import torch
from torch import Tensor


def rival(z: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The least logit [n, 1] with which torch.argmax would give the target, in `dtype`.

    Of equal logits argmax takes the first class. So the target's logit must reach the largest one of the classes after it, and be above
    the largest one of those before it: at least the next number.
    z: the logits [n, V] of a shard, -inf at the target.  target: its column [n, 1]; negative or V and more where another shard holds it.
    """
    is_before = torch.arange(z.shape[1], device=z.device) < target  # [n, V]
    before, largest = (each.amax(-1, keepdim=True).to(dtype) for each in (z.masked_fill(~is_before, -torch.inf), z))
    return torch.where(before == largest, before.nextafter(before.new_full((), torch.inf)), largest)


def correct(statistics: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """1 for each token whose class is the argmax of its logits, otherwise 0; 0 where it is ignored. In the target's shape.

    statistics: [shards, N, columns] of all shards, the `rival` last.
    """
    first = statistics[..., 2].sum(0) >= statistics[..., -1].amax(0)
    return (first & (target.reshape(-1).long() != ignore_index)).to(statistics.dtype).view(target.shape)
