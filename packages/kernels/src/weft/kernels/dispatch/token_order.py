"""Tokens stored in another order than their sequence, as zigzag context parallelism does.

An order is a tuple of runs: memory holds the tokens [start, stop) of each run, run after run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .arguments import described, is_int
from .backend import is_compiling

Runs = tuple[tuple[int, int], ...]  # in memory order


def checked_order(name: str, order: Sequence[Sequence[int]], length: int, option: str = "order") -> Runs:
    """Return `order` as tuples. name, option: of the op, and of the argument.

    Raises ValueError unless the runs cover 0 to `length`, with each token in one run.
    """
    try:
        runs = tuple([(start, stop) for start, stop in order])
    except (TypeError, ValueError) as error:  # no pairs
        raise _order_error(name, option, order, length) from error
    for start, stop in runs:
        if not (is_int(start) and is_int(stop)):  # 1.0 and True are equal to an int, but no positions
            raise _order_error(name, option, order, length)
    if not is_compiling() and not _covers(runs, length):  # Dynamo warns about lru_cache
        raise _order_error(name, option, order, length)
    return runs


def checked_orders(name: str, orders: Sequence[Sequence[Sequence[int]]], length: int) -> tuple[Runs, ...]:
    """Return the orders of several rows as tuples. Raises ValueError as `checked_order`."""
    if not isinstance(orders, Sequence):
        raise ValueError(f"{name}: orders is {described(orders)}; give an order for each row of this rank")
    return tuple([checked_order(name, each, length, "a row of orders") for each in orders])


def _order_error(name: str, option: str, order: object, length: int) -> ValueError:
    return ValueError(
        f"{name}: {option} is {described(order)}, but the tokens are 0 to {length}; give runs [start, stop) with each "
        f"token once"
    )


@lru_cache(maxsize=1024)
def _covers(runs: Runs, length: int) -> bool:
    ends = [0, *(stop for _, stop in sorted(runs))]
    starts = [*(start for start, _ in sorted(runs)), length]
    return ends == starts and all(start <= stop for start, stop in runs)


@lru_cache(maxsize=4096)
def runs_within(order: Runs, start: int, stop: int) -> Runs:
    """The runs of the tokens stored at positions `start` to `stop` in memory."""
    runs: list[tuple[int, int]] = []
    place = 0
    for first, last in order:
        here = first + max(0, start - place), first + min(last - first, stop - place)
        place += last - first
        if here[0] < here[1]:
            runs.append(here)
    return tuple(runs)


def as_read(x: Tensor, order: Runs, dim: int) -> Tensor:
    """Reorder x from memory order `order` to sequence order, along `dim`.

    order: the runs of the tokens in x: all tokens of the sequence, or those of a rank; () for a rank without tokens.
    """
    if not order:
        return x
    parts = torch.split(x, [stop - start for start, stop in order], dim)  # backward is a single concatenation
    return torch.cat([parts[i] for i in sorted(range(len(order)), key=order.__getitem__)], dim)


def as_laid(x: Tensor, order: Runs, dim: int) -> Tensor:
    """Reorder x from sequence order to memory order `order`, along `dim`: the reverse of `as_read`."""
    if not order:
        return x
    ascending = sorted(range(len(order)), key=order.__getitem__)
    parts = torch.split(x, [order[i][1] - order[i][0] for i in ascending], dim)
    return torch.cat([parts[ascending.index(i)] for i in range(len(order))], dim)
