"""All-gathers of the shards' statistics, and all-reduces of sums over tokens, over process groups.

In `vocab_parallel_cross_entropy` the all-gather also tells every rank which ranks have failed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard.running.collectives import Pending, Running, start_all_gather
from weft.reshard.running.groups import group_named, name_of, of_this_world
from weft.reshard.running.waits import wait_for

from ...backend import has_data
from . import agreement
from .agreement import Classes

Result = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Over:
    """A collective over several groups in turn."""

    groups: tuple[dist.ProcessGroup, ...]  # a group for each mesh axis, minor first; or a single group over all

    @property
    def names(self) -> list[str]:
        return [name_of(group) for group in self.groups]


class Along(_Over):
    """A `Gather` over the axes that shard the vocabulary: one all-gather for each group."""

    @classmethod
    def named(cls, names: Sequence[str] | None) -> Along | None:
        """Make an instance for the groups with these names; None if there are none."""
        return cls(tuple(map(group_named, names))) if names else None

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(self._running(statistics)).wait

    def _running(self, statistics: Tensor) -> Running:
        gathered = statistics.unsqueeze(0)
        for group in self.groups:
            gathered = yield from _along(group, gathered)
        return gathered


class Summed(_Over):
    """A `Count` over the axes that shard the tokens: one all-reduce for each group."""

    def __call__(self, part: Tensor) -> Tensor:
        for group in self.groups:
            wait_for(dist.all_reduce(part, group=group, async_op=True))
        return part


@dataclass(frozen=True, slots=True)
class Checked:
    """A `Gather` over one group: the statistics, with each rank's classes and failure flag in two further rows.

    Raises ValueError if another rank has failed or if the ranks' classes do not fit together. If `check_once` skips
    that check, the gathered statistics are NaN instead.
    """

    group: dist.ProcessGroup
    shard_classes: Classes  # this rank's
    failed: Exception | None = None  # this rank's error, raised after the gather, once all ranks know

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(self._running(statistics)).wait

    def _running(self, statistics: Tensor) -> Running:
        rows = self.shard_classes.as_rows(statistics) if self.failed is None else agreement.failure_rows(statistics)
        gathered = yield from _along(self.group, torch.cat((statistics, rows)).unsqueeze(0))  # [ranks, N + 2, C]
        if self.failed is not None:
            raise self.failed
        gathered, classes = gathered[:, :-2], gathered[:, -2:, :3]
        ranks, vocab_size = dist.get_process_group_ranks(self.group), self.shard_classes.vocab_size
        check_once(
            (self.group, self.shard_classes),
            classes,
            lambda: agreement.check_shards(ranks, classes.tolist(), vocab_size),
        )
        if not agreement.on_gpu(classes):
            return gathered
        return torch.where(agreement.shards_fit(classes, vocab_size), gathered, torch.nan)


def attempted(
    attempt: Callable[[], Result], group: dist.ProcessGroup, shard_classes: Classes, stand_in: Callable[[], Tensor]
) -> tuple[Result, Checked]:
    """Call `attempt` and return the result and the gather to use.

    If `attempt` raises, this rank first joins a gather with `stand_in` and a failure flag: the other ranks wait for
    it. Then the error is raised.
    """
    try:
        return attempt(), Checked(group, shard_classes)
    except Exception as error:
        Checked(group, shard_classes, error)(stand_in())()
        raise


def check_once(key: Hashable, gathered: Tensor, check: Callable[[], None]) -> None:
    """Call `check` on gathered numbers: each time on a CPU, once for each key on a GPU, never without data.

    On a GPU the host must wait for the device to check. Nothing is checked while a CUDA graph is captured.
    """
    if gathered.is_meta or not has_data(gathered):
        return
    if agreement.on_gpu(gathered) and (key in of_this_world() or torch.cuda.is_current_stream_capturing()):
        return
    check()
    of_this_world()[key] = True


def _along(group: dist.ProcessGroup, part: Tensor) -> Running:
    """All-gather [K, ...] of each rank to [ranks * K, ...], in rank order."""
    size = dist.get_world_size(group)
    if size == 1:
        return part
    gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
    yield start_all_gather(gathered, part, group)
    return gathered
