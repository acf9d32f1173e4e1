"""Compares the ranks' sizes and failures, by one all-gather before the gathers of the parts."""

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
    attempt: Callable[[], tuple[Result, Sizes]], group: dist.ProcessGroup, classes: Classes, device: torch.device
) -> tuple[Result, Tensor]:
    """Call `attempt` and compare the ranks' sizes. Returns the result, and a scalar: 0, or NaN if the sizes differ.

    attempt: returns a result and this rank's sizes, or raises.
    Communication: one all-gather of 36 bytes per rank, also if a rank has failed.
    Raises as `attempted` does, and ValueError if the sizes differ and `check_once` checks them.
    """
    (result, sizes), gather = attempted(attempt, group, classes, lambda: _row(Sizes(), device))
    gathered = gather(_row(sizes, device))()[:, 0]  # [ranks, 3]
    ranks = dist.get_process_group_ranks(group)
    check_once((group, classes, sizes), gathered, lambda: check_sizes(ranks, gathered.tolist()))
    return result, torch.where((gathered == gathered[0]).all(), gathered.new_zeros(()), torch.nan)


def _row(sizes: Sizes, device: torch.device) -> Tensor:
    """The sizes as a tensor [1, 3], made without a copy from the host, for which the host would wait."""
    return torch.cat([torch.full((1,), size, dtype=torch.float32, device=device) for size in sizes]).unsqueeze(0)
