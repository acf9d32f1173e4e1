"""Where the shards of the vocabulary meet: the gathers of their statistics, and what the ranks of a group tell each other in one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard.collectives import Pending, Running, all_gather_single
from weft.reshard.groups import of_this_world

from .function import Gather
from .options import Asked


def starting(groups: list[dist.ProcessGroup]) -> Gather:
    """Gathers over the groups of the axes that shard the vocabulary, minor first: one all-gather for each."""

    def running(statistics: Tensor) -> Running:
        gathered = statistics.unsqueeze(0)
        for group in groups:
            gathered = yield from _along(group, gathered)
        return gathered

    return lambda statistics: Pending(running(statistics)).wait


@dataclass(frozen=True, slots=True)
class Classes:
    """Those that a rank holds: start to start + size of vocab_size."""

    start: int
    size: int
    vocab_size: int


def starting_checked(group: dist.ProcessGroup, held: Classes, failed: Exception | None) -> Gather:
    """Gathers over one group; with the statistics goes what each rank holds, and whether it can go on.

    Raises what has `failed` here, and ValueError where another rank has failed or the ranks' classes do not fit; see
    `look_once`. Where it did not look, NaN is gathered then.
    """

    def running(statistics: Tensor) -> Running:
        place = statistics.new_zeros(2, statistics.shape[1])
        if failed is None:
            for i, number in enumerate((held.start, held.size)):
                place[0, i], place[1, i] = number % HALF, number // HALF  # float32 has 24 bits
        else:
            place[1, 2] = 1
        everyone = yield from _along(group, torch.cat((statistics, place)).unsqueeze(0))  # [ranks, N + 2, C]
        if failed is not None:
            raise failed
        gathered, places = everyone[:, :-2], everyone[:, -2:, :3]
        look_once((group, held), places, lambda: _check_places(group, places.tolist(), held.vocab_size))
        if not on_gpu(places):
            return gathered
        sizes = places[:, 0, 1].sum() + HALF * places[:, 1, 1].sum()
        return torch.where((sizes == held.vocab_size) & (places[:, 1, 2] == 0).all(), gathered, torch.nan)

    return lambda statistics: Pending(running(statistics)).wait


HALF = 1 << 20  # numbers are sent in two parts


def look_once(met: Hashable, told: Tensor, check: Callable[[], None]) -> None:
    """Checks what the ranks told: on a CPU always; on a GPU when it is first met and no graph is captured, for the host waits."""
    if on_gpu(told) and (met in of_this_world() or torch.cuda.is_current_stream_capturing()):
        return
    check()
    of_this_world()[met] = True


def on_gpu(tensor: Tensor) -> bool:
    """Whether the host would wait to read it."""
    return tensor.is_cuda


def values_on_ranks(group: dist.ProcessGroup, values: Iterable[float]) -> list[str]:
    """Each value with a rank that has it, in words: one entry where all are the same."""
    found = {int(value): rank for rank, value in zip(dist.get_process_group_ranks(group), values, strict=True)}
    return [f"{value} on rank {rank}" for value, rank in found.items()]


def stand_in(tokens: int, logits: Tensor, options: Asked) -> Tensor:
    """Statistics of a rank that has none, of the shape and dtype that the others gather."""
    dtype = torch.promote_types(logits.dtype, torch.float32) if logits.is_floating_point() else torch.float32
    return torch.zeros(tokens, 4 if options.get("label_smoothing") else 3, dtype=dtype, device=logits.device)


def _along(group: dist.ProcessGroup, part: Tensor) -> Running:
    """[K, ...] of each rank -> [ranks * K, ...], in the order of the ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return part
    everyone = part.new_empty((size * part.shape[0], *part.shape[1:]))
    yield all_gather_single(everyone, part.contiguous(), group, async_op=True)
    return everyone


def _check_places(group: dist.ProcessGroup, places: list[list[list[float]]], vocab_size: int) -> None:
    ranks = dist.get_process_group_ranks(group)
    failed = [rank for rank, (_, high) in zip(ranks, places, strict=True) if high[2]]
    if failed:
        raise ValueError(f"cross-entropy cannot go on: see the error of rank {', '.join(map(str, failed))}")
    found = []
    for rank, (low, high) in zip(ranks, places, strict=True):
        start, size = (int(low[i]) + HALF * int(high[i]) for i in (0, 1))
        if size:
            found.append((start, start + size, rank))
    found.sort()
    stops = [0, *(stop for _, stop, _ in found)]
    if stops[-1] != vocab_size or any(begin != stop for (begin, _, _), stop in zip(found, stops, strict=False)):
        told = ", ".join(f"{begin} to {stop} on rank {rank}" for begin, stop, rank in found)
        raise ValueError(
            f"the ranks hold the classes {told}, which are not each of a vocabulary of {vocab_size} once; give each rank "
            f"its own logits, not gathered ones, and vocab_start and vocab_size to fit"
        )
