"""Communication of cross-entropy on shards: all-gathers of statistics, and all-reduces of sums over tokens.

The statistics' all-gather of `vocab_parallel_cross_entropy` also carries two rows about each rank: which classes the
rank has, and whether the rank has failed. If a rank has failed, every rank raises, and no rank waits forever.
`vocab_parallel_linear_cross_entropy` checks the ranks in an earlier gather, of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard.extension import (
    Pending,
    Running,
    graph_name_of,
    group_named,
    start_all_gather,
    start_sum,
    wait_for,
    world_cache,
)

from ...dispatch.arguments import described
from ...dispatch.backend import has_data, is_compiling

# Class numbers are gathered as two digits of this base, number % BASE and number // BASE: the rows are float32, which
# is exact for 24 bits only.
BASE = 1 << 20

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _GroupCollective:
    """A collective over a product of mesh axes: run over each of the groups in turn."""

    # A group for each mesh axis, the axis whose coordinate changes fastest from rank to rank first; or one group of
    # all axes.
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def names(self) -> list[str]:
        """The names of the groups, by which a custom op receives them."""
        return [graph_name_of(group) for group in self.groups]


class VocabGather(_GroupCollective):
    """The gather of statistics over the axes that shard the vocabulary: one all-gather for each group.

    Called with this rank's statistics, starts the gather. Returns a function, which waits for the gather and returns
    the statistics of all ranks.
    """

    @classmethod
    def from_names(cls, names: Sequence[str] | None) -> VocabGather | None:
        """Return the gather over the groups of these `names`, in a custom op; None if there are none."""
        return cls(tuple(map(group_named, names))) if names else None

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(_all_gather(self.groups, statistics)).wait


class TokenAllReduce(_GroupCollective):
    """The sum over the axes that shard the tokens: one all-reduce for each group, in place."""

    def __call__(self, part: Tensor) -> Tensor:
        for group in self.groups:
            wait_for(start_sum(part, group))
        return part


@dataclass(frozen=True, slots=True)
class CheckedGather:
    """A `StartGather` over one group that also checks the ranks, by two more rows of statistics from each rank.

    Raises ValueError if another rank has failed, or if the ranks' classes do not fit together. Where `check_gathered`
    skips this check on a GPU, the statistics become NaN, if a rank has failed or the ranks do not fit. The failed rank
    raises its own error.
    """

    group: dist.ProcessGroup
    classes: ShardClasses  # this rank's
    failed: Exception | None = None  # this rank's error, raised after the gather, once all ranks know

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(self._gather_and_check(statistics)).wait

    def _gather_and_check(self, statistics: Tensor) -> Running:
        """A coroutine of `Pending`: yields the collective that it waits for."""
        rows = self.classes.to_rows(statistics) if self.failed is None else _failure_rows(statistics)
        gathered = yield from _all_gather((self.group,), torch.cat((statistics, rows)))  # [ranks, N + 2, C]
        if self.failed is not None:
            raise self.failed
        gathered, rows = gathered[:, :-2], gathered[:, -2:, :3]
        ranks, vocab_size = dist.get_process_group_ranks(self.group), self.classes.vocab_size
        check_gathered(
            (self.group, self.classes),
            rows,
            lambda: _check_shards(ranks, rows.tolist(), vocab_size),
        )
        if not on_gpu(rows):
            return gathered
        return torch.where(_shards_fit(rows, vocab_size), gathered, torch.nan)


def check_group(op: str, group: object) -> None:
    """Raise ValueError unless `group` is a process group with this rank. op: the op's name."""
    # torch gives a rank outside a new group a group of another kind
    is_group = isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER
    if not is_group and not is_compiling():
        raise ValueError(
            f"{op}: group is {described(group)}; give the process group of the ranks with the vocabulary, as "
            f"dist.group.WORLD"
        )
    if dist.get_rank(group) < 0:  # type: ignore[arg-type]  # a group, by the check above
        raise ValueError(f"rank {dist.get_rank()} is not in the group; call this on its ranks alone")


def run_or_report(
    attempt: Callable[[], Result],
    group: dist.ProcessGroup,
    classes: ShardClasses,
    make_placeholder: Callable[[], Tensor],
) -> tuple[Result, CheckedGather]:
    """Call `attempt`, which may fail on this rank alone. Returns the result and the gather to use.

    If `attempt` raises, this rank joins the gather in which the other ranks are, with `make_placeholder()` in place of
    statistics and a failure flag. Then the error is raised.
    """
    try:
        return attempt(), CheckedGather(group, classes)
    except Exception as error:
        gather = CheckedGather(group, classes, error)
        wait = gather(make_placeholder())
        wait()  # raises the error
        raise  # for type checkers


def check_gathered(key: Hashable, gathered: Tensor, check: Callable[[], None]) -> None:
    """Call `check`, which reads gathered numbers: in every call on a CPU, but once for each key on a GPU.

    key: the group and the values to compare.
    To read the numbers from a GPU, the host waits for the device. Nothing is checked while a CUDA graph is captured,
    nor for a tensor without data.
    """
    if gathered.is_meta or not has_data(gathered):
        return
    if on_gpu(gathered) and (key in world_cache() or torch.cuda.is_current_stream_capturing()):
        return
    check()
    world_cache()[key] = True


def _all_gather(groups: Sequence[dist.ProcessGroup], statistics: Tensor) -> Running:
    """All-gather the statistics [N, C] of each rank to [ranks, N, C]: one all-gather for each group in turn."""
    part = statistics.unsqueeze(0)
    for group in groups:
        size = group.size()
        if size > 1:
            gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
            yield start_all_gather(gathered, part, group)
            part = gathered
    return part


@dataclass(frozen=True, slots=True)
class ShardClasses:
    """The classes of a rank's shard: from `start` to `start + size`, in a vocabulary of `vocab_size` classes."""

    start: int
    size: int
    vocab_size: int

    def to_rows(self, like: Tensor) -> Tensor:
        """Two rows to gather below the statistics `like`: the low digits of start and size, then the high digits."""
        rows = like.new_zeros(2, like.shape[-1])
        for i, number in enumerate((self.start, self.size)):
            rows[0, i], rows[1, i] = number % BASE, number // BASE
        return rows


def _failure_rows(like: Tensor) -> Tensor:
    """The rows gathered instead of `ShardClasses.to_rows` by a rank that has failed: a flag behind the high digits."""
    rows = like.new_zeros(2, like.shape[-1])
    rows[1, 2] = 1
    return rows


def _shards_fit(rows: Tensor, vocab_size: int) -> Tensor:
    """Whether no rank has failed and the sizes add up to vocab_size, as a bool tensor. rows: [ranks, 2, 3].

    `_check_shards` finds more faults, but reads the rows on the host; this function reads nothing on the host.
    """
    sizes = rows[:, 0, 1].sum() + BASE * rows[:, 1, 1].sum()
    return (sizes == vocab_size) & (rows[:, 1, 2] == 0).all()


def _check_shards(ranks: Sequence[int], rows: list[list[list[float]]], vocab_size: int) -> None:
    """Raise ValueError if a rank has failed, or if the shards do not hold each class of the vocabulary exactly once.

    rows: [ranks, 2, 3], the gathered rows.
    """
    failed = [rank for rank, (_, high) in zip(ranks, rows, strict=True) if high[2]]
    if failed:
        raise ValueError(f"cross-entropy cannot go on: see the error of rank {', '.join(map(str, failed))}")
    shards = []
    for rank, (low, high) in zip(ranks, rows, strict=True):
        start, size = (int(low[i]) + BASE * int(high[i]) for i in (0, 1))
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


def on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU. The host then waits for the device whenever it reads the tensor."""
    return tensor.is_cuda


def placeholder_statistics(target: Tensor, logits: Tensor, columns: int) -> Tensor:
    """Zeros instead of the statistics of a rank that has failed, with the other ranks' shape and dtype."""
    dtype = torch.promote_types(logits.dtype, torch.float32) if logits.is_floating_point() else torch.float32
    return torch.zeros(target.numel(), columns, dtype=dtype, device=logits.device)
