"""One all-gather of the ranks' sizes and failures, before they gather a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...cross_entropy.sharded.agreement import Classes
from ...cross_entropy.sharded.gather import attempted, check_once
from .agreement import Sizes, check_sizes

Result = TypeVar("Result")


def compared(
    attempt: Callable[[], tuple[Result, Sizes]], group: dist.ProcessGroup, held: Classes, device: torch.device
) -> tuple[Result, Tensor]:
    """What `attempt` returns, and a scalar: 0 where the ranks' sizes agree, otherwise NaN.

    Communication: one all-gather of 36 bytes a rank, also where a rank has failed.
    Raises as `attempted` does, and ValueError where the sizes differ and `check_once` checks them.
    """
    (result, sizes), gather = attempted(attempt, group, held, lambda: _row(Sizes(), device))
    gathered = gather(_row(sizes, device))()[:, 0]  # [ranks, 3]
    ranks = dist.get_process_group_ranks(group)
    check_once((group, held, sizes), gathered, lambda: check_sizes(ranks, gathered.tolist()))
    return result, torch.where((gathered == gathered[0]).all(), gathered.new_zeros(()), torch.nan)


def _row(sizes: Sizes, device: torch.device) -> Tensor:
    """[1, 3], without a copy from the host, which would wait."""
    return torch.cat([torch.full((1,), size, dtype=torch.float32, device=device) for size in sizes]).unsqueeze(0)
