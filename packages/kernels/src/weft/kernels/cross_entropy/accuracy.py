"""Token accuracy: whether a token's class has the largest logit.

Each shard computes one further statistic, in the same pass over the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rival(z: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The least logit [n, 1] for which torch.argmax would still return the target, in `dtype`.

    torch.argmax returns the first of equal logits. So the target's logit must be at least the largest logit of the
    classes after the target, and at least the next float above the largest logit of the classes before.

    z: a shard's logits [n, V], -inf at the target.
    target: the target's column [n, 1]; negative, or V or more, if another shard has the target.
    """
    is_before = torch.arange(z.shape[1], device=z.device) < target  # [n, V]
    before, largest = (each.amax(-1, keepdim=True).to(dtype) for each in (z.masked_fill(~is_before, -torch.inf), z))
    return torch.where(before == largest, before.nextafter(before.new_full((), torch.inf)), largest)


def correct(statistics: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """For each token, 1 if its class has the largest logit, otherwise 0. Ignored tokens are 0. Shaped as `target`.

    statistics: [shards, N, columns] of all shards; the last column is the `rival`.
    """
    first = statistics[..., 2].sum(0) >= statistics[..., -1].amax(0)
    return (first & (target.reshape(-1).long() != ignore_index)).to(statistics.dtype).view(target.shape)
