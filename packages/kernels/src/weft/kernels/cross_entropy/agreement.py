"""What the ranks of a group tell each other beside their statistics, and what they must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = 1 << 20  # numbers are sent in two parts: float32 has 24 bits


@dataclass(frozen=True, slots=True)
class Classes:
    """Those that a rank holds: start to start + size of vocab_size."""

    start: int
    size: int
    vocab_size: int

    def told(self, like: Tensor) -> Tensor:
        """As two rows of the dtype and length of `like`'s."""
        place = like.new_zeros(2, like.shape[-1])
        for i, number in enumerate((self.start, self.size)):
            place[0, i], place[1, i] = number % HALF, number // HALF
        return place


def failure(like: Tensor) -> Tensor:
    """What a rank that cannot go on tells in place of its classes."""
    place = like.new_zeros(2, like.shape[-1])
    place[1, 2] = 1
    return place


def fit(places: Tensor, vocab_size: int) -> Tensor:
    """Whether no rank has failed and the sizes add up, as a bool on the device; places: [ranks, 2, 3]."""
    sizes = places[:, 0, 1].sum() + HALF * places[:, 1, 1].sum()
    return (sizes == vocab_size) & (places[:, 1, 2] == 0).all()


def check_places(ranks: Sequence[int], places: list[list[list[float]]], vocab_size: int) -> None:
    """Raises ValueError where a rank has failed, or where the ranks' classes are not each of the vocabulary once."""
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


def values_on_ranks(ranks: Sequence[int], values: Iterable[float]) -> list[str]:
    """Each value with a rank that has it, in words: one entry where all are the same."""
    found = {int(value): rank for rank, value in zip(ranks, values, strict=True)}
    return [f"{value} on rank {rank}" for value, rank in found.items()]


def on_gpu(tensor: Tensor) -> bool:
    """Whether the host would wait to read it."""
    return tensor.is_cuda


def stand_in(target: Tensor, logits: Tensor, smoothing: bool) -> Tensor:
    """Statistics of a rank that has none, of the shape and dtype that the others gather."""
    dtype = torch.promote_types(logits.dtype, torch.float32) if logits.is_floating_point() else torch.float32
    return torch.zeros(target.numel(), 4 if smoothing else 3, dtype=dtype, device=logits.device)
