"""Checks of config fields. Each raises a ValueError with the class, the field, the value and the remedy."""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

# Layers of a model, and heads of a layer: ten times any published model's. Each layer of a model becomes a module.
MOST_LAYERS = 100_000
MOST_ELEMENTS = 2**40  # of one tensor: torch counts the tensor's bytes in 64 bits
MOST_NEW_TOKENS = 2**24  # of a row in `generate`, which allocates memory for all before drawing the first


class Cut(Protocol):
    """A config as `check_tensor_parallel` reads it."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Name -> size, of the sizes divided by tensor parallelism."""


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError unless each field is an int from 1 to MOST_ELEMENTS."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be an int >= 1")
        _check_at_most(config, name, value, MOST_ELEMENTS)


def check_counts(config: Any, *names: str) -> None:
    """Raises ValueError unless each field, a number of layers or heads, is an int from 1 to MOST_LAYERS."""
    check_sizes(config, *names)
    for name in names:
        _check_at_most(config, name, getattr(config, name), MOST_LAYERS)


def check_table(config: Any, *names: str) -> None:
    """Raises ValueError where the product of the fields, a tensor's sizes, is above MOST_ELEMENTS."""
    sizes = [getattr(config, name) for name in names]
    _check_at_most(config, " * ".join(names), math.prod(sizes), MOST_ELEMENTS)


def _check_at_most(config: Any, name: str, value: int, most: int) -> None:
    if value > most:
        shown = f"{value:,}" if value < 10**30 else "a number of many digits"
        raise ValueError(f"{type(config).__name__}: {name} is {shown}; it may be {most:,} at most")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError unless each field is a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be a number > 0")


def check_probabilities(config: Any, *names: str) -> None:
    """Raises ValueError unless each field is a dropout probability: 0 <= p < 1."""
    for name in names:
        p = getattr(config, name)
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {p!r}; it must be a number in 0 <= {name} < 1")


def check_choice(config: Any, name: str, choices: tuple[Any, ...]) -> None:
    """Raises ValueError unless the field is one of `choices`."""
    value = getattr(config, name)
    if isinstance(value, bool) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be one of {listed}")


def check_tensor_parallel(config: Cut, ways: int) -> None:
    """Raises ValueError where tp=`ways` does not divide the heads or hidden sizes, and lists the degrees that work.

    `ways` may be a multiple of the number of key and value heads: each of these heads is then replicated on several
    ranks.
    """
    misfits = _misfits(config, ways)
    if misfits:
        works = [n for n in range(1, config.parallel_sizes["num_heads"] + 1) if not _misfits(config, n)]
        raise ValueError(
            f"tp={ways} does not divide {' and '.join(misfits)}; degrees that work: {', '.join(map(str, works))}"
        )


def _misfits(config: Cut, ways: int) -> list[str]:
    sizes = config.parallel_sizes.items()
    return [
        f"{name} {size}" for name, size in sizes if size % ways and not (name == "num_kv_heads" and ways % size == 0)
    ]
