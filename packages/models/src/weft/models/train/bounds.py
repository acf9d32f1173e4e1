"""The bounds of a run's numbers, checked when a configuration is made."""

from __future__ import annotations

import math
from collections.abc import Callable

LARGEST = 2**31 - 1  # of the whole numbers of a run: no step, size or seed of a run is larger


def check_at_least(where: str, config: object, least: int, *names: str) -> None:
    """Raises ValueError unless each field named is a finite number of `least` or more. where: the group of the options."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: value >= least, f"{least} or more")


def check_above_zero(where: str, config: object, *names: str) -> None:
    """Raises ValueError unless each field named is a finite number above 0. where: the group of the options."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: value > 0, "above 0")


def check_decay_rates(where: str, config: object, *names: str) -> None:
    """Raises ValueError unless each field named is in [0, 1): a mean with a decay of 1 never takes up a gradient."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: 0 <= value < 1, "0 or more, and below 1")


def check_at_most(where: str, config: object, most: int, *names: str) -> None:
    """Raises ValueError for a field named that is above `most`, or below `-most`; None is passed by. where: the group of the options."""
    for name in names:
        value = getattr(config, name)
        if value is not None and abs(value) > most:
            shown = f"{value}" if isinstance(value, float) or abs(value) < 10**20 else "a number of many digits"
            raise ValueError(f"{where}.{name} is {shown}; it must be {most:,} or less")


def _check(where: str, name: str, value: float, fits: Callable[[float], bool], words: str) -> None:
    if not (math.isfinite(value) and fits(value)):
        raise ValueError(f"{where}.{name} is {value}; it must be {words}")
