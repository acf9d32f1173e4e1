"""All-gathers of the shards' statistics, and all-reduces of sums over tokens, on process groups.

In `vocab_parallel_cross_entropy` the all-gather also tells every rank which rank has failed.
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

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Over:
    """groups: one for each axis of a mesh, or for several axes, minor first."""

    groups: tuple[dist.ProcessGroup, ...]

    @property
    def names(self) -> list[str]:
        return [name_of(group) for group in self.groups]


class Along(_Over):
    """Gathers over the axes that shard the vocabulary: an all-gather for each group."""

    @classmethod
    def named(cls, names: Sequence[str] | None) -> Along | None:
        """Over the groups of those names; None where nothing is to be gathered."""
        return cls(tuple(map(group_named, names))) if names else None

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(self._running(statistics)).wait

    def _running(self, statistics: Tensor) -> Running:
        gathered = statistics.unsqueeze(0)
        for group in self.groups:
            gathered = yield from _along(group, gathered)
        return gathered


class Summed(_Over):
    """Sums over the axes that shard the tokens: an all-reduce for each group."""

    def __call__(self, part: Tensor) -> Tensor:
        for group in self.groups:
            wait_for(dist.all_reduce(part, group=group, async_op=True))
        return part


@dataclass(frozen=True, slots=True)
class Checked:
    """Gathers over one group: the statistics, and below them each rank's classes and whether it has failed.

    failed: the error of this rank. It is raised after the gather, when the other ranks know of it.
    Raises ValueError where another rank has failed, or where the ranks' classes do not fit together. Where `check_once` skips that
    check, the gathered statistics are NaN instead.
    """

    group: dist.ProcessGroup
    held: Classes
    failed: Exception | None = None

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(self._running(statistics)).wait

    def _running(self, statistics: Tensor) -> Running:
        rows = self.held.as_rows(statistics) if self.failed is None else agreement.failure_rows(statistics)
        gathered = yield from _along(self.group, torch.cat((statistics, rows)).unsqueeze(0))  # [ranks, N + 2, C]
        if self.failed is not None:
            raise self.failed
        gathered, classes = gathered[:, :-2], gathered[:, -2:, :3]
        ranks, vocab_size = dist.get_process_group_ranks(self.group), self.held.vocab_size
        check_once(
            (self.group, self.held), classes, lambda: agreement.check_shards(ranks, classes.tolist(), vocab_size)
        )
        if not agreement.on_gpu(classes):
            return gathered
        return torch.where(agreement.shards_fit(classes, vocab_size), gathered, torch.nan)


def attempted(
    attempt: Callable[[], Found], group: dist.ProcessGroup, held: Classes, stand_in: Callable[[], Tensor]
) -> tuple[Found, Checked]:
    """What `attempt` returns, and the gather to use.

    If it raises, this rank still takes part in one gather, with `stand_in` and its failure: the other ranks would wait for it. Then the
    error is raised.
    """
    try:
        return attempt(), Checked(group, held)
    except Exception as error:
        Checked(group, held, error)(stand_in())()
        raise


def check_once(key: Hashable, gathered: Tensor, check: Callable[[], None]) -> None:
    """Checks what was gathered: on a CPU each time, on a GPU once for each key, and never what has no data.

    On a GPU the host must wait for the device to check. So there is no check while a CUDA graph is captured.
    """
    if gathered.is_meta or not has_data(gathered):
        return
    if agreement.on_gpu(gathered) and (key in of_this_world() or torch.cuda.is_current_stream_capturing()):
        return
    check()
    of_this_world()[key] = True


def _along(group: dist.ProcessGroup, part: Tensor) -> Running:
    """[K, ...] of each rank -> [ranks * K, ...], in the order of the ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return part
    gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
    yield start_all_gather(gathered, part, group)
    return gathered
