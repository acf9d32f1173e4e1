"""Communication of cross-entropy on shards: gathers of statistics, sums over tokens, and checks among ranks.

All-gathers of the shards' statistics, and all-reduces of sums over tokens, over process groups.

In `vocab_parallel_cross_entropy` the all-gather also tells every rank which ranks have failed.

The numbers gathered with the statistics in `vocab_parallel_cross_entropy`, and the checks of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard.extension import Pending, Running, graph_name_of, group_named, start_all_gather, wait_for, world_cache

from ...dispatch.backend import has_data

LOW = 1 << 20  # gathered as number % LOW and number // LOW, since float32 has 24 bits

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Over:
    """A collective over several groups in turn."""

    groups: tuple[dist.ProcessGroup, ...]  # a group for each mesh axis, minor first; or a single group over all

    @property
    def names(self) -> list[str]:
        return [graph_name_of(group) for group in self.groups]


class Along(_Over):
    """A `Gather` over the axes that shard the vocabulary: one all-gather for each group."""

    @classmethod
    def named(cls, names: Sequence[str] | None) -> Along | None:
        """Make an instance for the groups with these names; None if there are none."""
        return cls(tuple(map(group_named, names))) if names else None

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(_gathered(self.groups, statistics)).wait


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
        rows = self.shard_classes.as_rows(statistics) if self.failed is None else failure_rows(statistics)
        gathered = yield from _gathered((self.group,), torch.cat((statistics, rows)))  # [ranks, N + 2, C]
        if self.failed is not None:
            raise self.failed
        gathered, classes = gathered[:, :-2], gathered[:, -2:, :3]
        ranks, vocab_size = dist.get_process_group_ranks(self.group), self.shard_classes.vocab_size
        check_once(
            (self.group, self.shard_classes),
            classes,
            lambda: check_shards(ranks, classes.tolist(), vocab_size),
        )
        if not on_gpu(classes):
            return gathered
        return torch.where(shards_fit(classes, vocab_size), gathered, torch.nan)


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
    if on_gpu(gathered) and (key in world_cache() or torch.cuda.is_current_stream_capturing()):
        return
    check()
    world_cache()[key] = True


def _gathered(groups: Sequence[dist.ProcessGroup], statistics: Tensor) -> Running:
    """All-gather the statistics [N, C] of each rank to [ranks, N, C]: one all-gather for each group, minor first."""
    part = statistics.unsqueeze(0)
    for group in groups:
        size = dist.get_world_size(group)
        if size > 1:
            gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
            yield start_all_gather(gathered, part, group)
            part = gathered
    return part


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a rank's shard: start to start + size of vocab_size."""

    start: int
    size: int
    vocab_size: int

    def as_rows(self, like: Tensor) -> Tensor:
        """Two rows to gather below the statistics `like`: the low parts of start and size, then the high parts."""
        rows = like.new_zeros(2, like.shape[-1])
        for i, number in enumerate((self.start, self.size)):
            rows[0, i], rows[1, i] = number % LOW, number // LOW
        return rows


def failure_rows(like: Tensor) -> Tensor:
    """The rows gathered instead of `Classes.as_rows` by a rank that has failed."""
    rows = like.new_zeros(2, like.shape[-1])
    rows[1, 2] = 1
    return rows


def shards_fit(classes: Tensor, vocab_size: int) -> Tensor:
    """Whether no rank has failed and the sizes add up to vocab_size, as a bool tensor. classes: [ranks, 2, 3]."""
    sizes = classes[:, 0, 1].sum() + LOW * classes[:, 1, 1].sum()
    return (sizes == vocab_size) & (classes[:, 1, 2] == 0).all()


def check_shards(ranks: Sequence[int], classes: list[list[list[float]]], vocab_size: int) -> None:
    """Raise ValueError if a rank has failed, or if the shards do not hold each class of the vocabulary exactly once.

    classes: [ranks, 2, 3], the gathered rows.
    """
    failed = [rank for rank, (_, high) in zip(ranks, classes, strict=True) if high[2]]
    if failed:
        raise ValueError(f"cross-entropy cannot go on: see the error of rank {', '.join(map(str, failed))}")
    shards = []
    for rank, (low, high) in zip(ranks, classes, strict=True):
        start, size = (int(low[i]) + LOW * int(high[i]) for i in (0, 1))
        if size:
            shards.append((start, start + size, rank))
    shards.sort()
    stops = [0, *(stop for _, stop, _ in shards)]
    if stops[-1] != vocab_size or any(start != stop for (start, _, _), stop in zip(shards, stops, strict=False)):
        held = ", ".join(f"{start} to {stop} on rank {rank}" for start, stop, rank in shards)
        raise ValueError(
            f"the ranks hold the classes {held}, which are not each of a vocabulary of {vocab_size} once; give each "
            f"rank its own logits, not gathered ones, and the vocab_start and vocab_size of these logits"
        )


def values_on_ranks(ranks: Sequence[int], values: Iterable[float]) -> list[str]:
    """Each distinct value with a rank that has it: "4 on rank 0". A single entry if all ranks agree."""
    rank_of = {int(value): rank for rank, value in zip(ranks, values, strict=True)}
    return [f"{value} on rank {rank}" for value, rank in rank_of.items()]


def on_gpu(tensor: Tensor) -> bool:
    """Whether the host would have to wait for the device to read the tensor."""
    return tensor.is_cuda


def stand_in(target: Tensor, logits: Tensor, columns: int) -> Tensor:
    """Zeros instead of the statistics of a rank that has failed, with the other ranks' shape and dtype."""
    dtype = torch.promote_types(logits.dtype, torch.float32) if logits.is_floating_point() else torch.float32
    return torch.zeros(target.numel(), columns, dtype=dtype, device=logits.device)
