"""The one gather in which the ranks of a group agree, before they gather in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...cross_entropy.agreement import Classes
from ...cross_entropy.sharded.gather import attempted, look_once
from ..agreement import Sizes, check_sizes

Found = TypeVar("Found")


def settled_by(
    attempt: Callable[[], tuple[Found, Sizes]], group: dist.ProcessGroup, held: Classes, device: torch.device
) -> tuple[Found, Tensor]:
    """What `attempt` found, and 0 where the ranks agree, otherwise NaN: by one gather of 36 bytes whatever is wrong with a
    rank. Raises as `attempted`, and ValueError where the sizes differ; see `look_once`.
    """
    (found, sizes), gather = attempted(attempt, group, held, lambda: _row(Sizes(), device))
    told = gather(_row(sizes, device))()[:, 0]  # [ranks, 3]
    ranks = dist.get_process_group_ranks(group)
    look_once((group, held, sizes), told, lambda: check_sizes(ranks, told.tolist()))
    return found, torch.where((told == told[0]).all(), told.new_zeros(()), torch.nan)


def _row(sizes: Sizes, device: torch.device) -> Tensor:
    """[1, 3], made by no copy from the host."""
    return torch.cat([torch.full((1,), size, dtype=torch.float32, device=device) for size in sizes]).unsqueeze(0)
