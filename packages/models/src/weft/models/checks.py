"""What the configs of models have checked: each a ValueError that names the class, the field, its value and the remedy."""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

MOST_LAYERS = 100_000  # of a model, and heads of a layer: ten times what any model has; a module is made of each layer
MOST_ELEMENTS = 2**40  # of one tensor, so that torch counts its bytes in 64 bits
MOST_NEW_TOKENS = 2**24  # that a row of `generate` is given: memory for all is taken before the first is drawn


class Cut(Protocol):
    """A config that says what tensor parallelism cuts."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """By name, the sizes that are cut."""


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError where a field is no int of 1 or more, or has more than MOST_ELEMENTS."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be an int >= 1")
        _check_at_most(config, name, value, MOST_ELEMENTS)


def check_counts(config: Any, *names: str) -> None:
    """Raises ValueError where a field is no int of 1 to MOST_LAYERS: a number of layers or heads."""
    check_sizes(config, *names)
    for name in names:
        _check_at_most(config, name, getattr(config, name), MOST_LAYERS)


def check_table(config: Any, *names: str) -> None:
    """Raises ValueError where a tensor with sides of these fields, which are sizes, has more than MOST_ELEMENTS."""
    sizes = [getattr(config, name) for name in names]
    _check_at_most(config, " * ".join(names), math.prod(sizes), MOST_ELEMENTS)


def _check_at_most(config: Any, name: str, value: int, most: int) -> None:
    if value > most:
        shown = f"{value:,}" if value < 10**30 else "a number of many digits"
        raise ValueError(f"{type(config).__name__}: {name} is {shown}; it may be {most:,} at most")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError where a field is no number above 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be a number > 0")


def check_probabilities(config: Any, *names: str) -> None:
    """Raises ValueError where a field is no share that can be dropped: 0 to 1, without 1."""
    for name in names:
        p = getattr(config, name)
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {p!r}; it must be a number in 0 <= {name} < 1")


def check_choice(config: Any, name: str, choices: tuple[Any, ...]) -> None:
    """Raises ValueError where a field is none of `choices`."""
    value = getattr(config, name)
    if isinstance(value, bool) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be one of {listed}")


def check_tensor_parallel(config: Cut, ways: int) -> None:
    """Raises ValueError where heads or hidden sizes cannot be cut in `ways`, listing the degrees that work.

    Key heads are fewer than `ways` where they divide it: each then lies on several ranks.
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
