"""The numbers gathered with the statistics in `vocab_parallel_cross_entropy`, and the checks of these numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOW = 1 << 20  # gathered as number % LOW and number // LOW, since float32 has 24 bits


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
