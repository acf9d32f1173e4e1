"""Gathers of the shards' statistics and sums of tokens over process groups; a group form's also tell what is wrong with a rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard.running.collectives import Pending, Running, all_gather_single
from weft.reshard.running.groups import group_named, name_of, of_this_world

from .. import agreement
from ..agreement import Classes

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Over:
    """groups: they span some axes of a mesh, one after the other, minor first."""

    groups: tuple[dist.ProcessGroup, ...]

    @property
    def names(self) -> list[str]:
        return [name_of(group) for group in self.groups]


class Along(_Over):
    """Gathers over the axes that shard the vocabulary: one all-gather for each group."""

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
    """Sums over the axes that shard the tokens: one all-reduce for each group."""

    def __call__(self, part: Tensor) -> Tensor:
        for group in self.groups:
            dist.all_reduce(part, group=group)
        return part


@dataclass(frozen=True, slots=True)
class Checked:
    """Gathers over one group; with the statistics goes what each rank holds, and whether it can go on.

    What has `failed` here is raised once the others know; ValueError where another rank has failed or the ranks' classes do
    not fit; see `look_once`. Where it did not look, NaN is gathered then.
    """

    group: dist.ProcessGroup
    held: Classes
    failed: Exception | None = None

    def __call__(self, statistics: Tensor) -> Callable[[], Tensor]:
        return Pending(self._running(statistics)).wait

    def _running(self, statistics: Tensor) -> Running:
        place = self.held.told(statistics) if self.failed is None else agreement.failure(statistics)
        everyone = yield from _along(self.group, torch.cat((statistics, place)).unsqueeze(0))  # [ranks, N + 2, C]
        if self.failed is not None:
            raise self.failed
        gathered, places = everyone[:, :-2], everyone[:, -2:, :3]
        ranks, vocab_size = dist.get_process_group_ranks(self.group), self.held.vocab_size
        look_once((self.group, self.held), places, lambda: agreement.check_places(ranks, places.tolist(), vocab_size))
        if not agreement.on_gpu(places):
            return gathered
        return torch.where(agreement.fit(places, vocab_size), gathered, torch.nan)


def attempted(
    attempt: Callable[[], Found], group: dist.ProcessGroup, held: Classes, stand_in: Callable[[], Tensor]
) -> tuple[Found, Checked]:
    """What `attempt` returns, and the gather that goes on with it. What it raises, of any kind, is gathered beside
    `stand_in`, so that the other ranks learn of it, and raised then.
    """
    try:
        return attempt(), Checked(group, held)
    except Exception as error:
        Checked(group, held, error)(stand_in())()
        raise


def look_once(met: Hashable, told: Tensor, check: Callable[[], None]) -> None:
    """Checks what the ranks told: on a CPU always; on a GPU when it is first met and no graph is captured, for the host waits."""
    if agreement.on_gpu(told) and (met in of_this_world() or torch.cuda.is_current_stream_capturing()):
        return
    check()
    of_this_world()[met] = True


def _along(group: dist.ProcessGroup, part: Tensor) -> Running:
    """[K, ...] of each rank -> [ranks * K, ...], in the order of the ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return part
    everyone = part.new_empty((size * part.shape[0], *part.shape[1:]))
    yield all_gather_single(everyone, part.contiguous(), group, async_op=True)
    return everyone
