"""Tokens that lie in another order than they are read in: runs of neighbours, as [start, stop) of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .backend import is_compiling

Runs = tuple[tuple[int, int], ...]  # in the order in which they lie


def checked_order(name: str, order: Sequence[Sequence[int]], length: int) -> Runs:
    """`order` as tuples. Raises ValueError where its runs are not `length` tokens, each once. name: of the op."""
    runs = tuple([(start, stop) for start, stop in order])
    if not is_compiling() and not _covers(runs, length):  # Dynamo warns of what is kept
        raise ValueError(
            f"{name}: order is {list(runs)}, but the tokens are 0 to {length}; give [start, stop) of runs that have each "
            f"of them once"
        )
    return runs


@lru_cache(maxsize=1024)
def _covers(runs: Runs, length: int) -> bool:
    ends = [0, *(stop for _, stop in sorted(runs))]
    starts = [*(start for start, _ in sorted(runs)), length]
    return ends == starts and all(start <= stop for start, stop in runs)


@lru_cache(maxsize=4096)
def runs_within(order: Runs, start: int, stop: int) -> Runs:
    """The runs of the tokens that lie at `start` to `stop`."""
    runs: list[tuple[int, int]] = []
    place = 0
    for first, last in order:
        here = first + max(0, start - place), first + min(last - first, stop - place)
        place += last - first
        if here[0] < here[1]:
            runs.append(here)
    return tuple(runs)


def as_read(x: Tensor, order: Runs, dim: int) -> Tensor:
    """x, whose tokens lie in `order` along `dim`, with them as they are read."""
    parts = torch.split(x, [stop - start for start, stop in order], dim)  # its backward is one concatenation
    return torch.cat([parts[i] for i in sorted(range(len(order)), key=order.__getitem__)], dim)


def as_laid(x: Tensor, order: Runs, dim: int) -> Tensor:
    """The reverse of `as_read`."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in order], dim)
