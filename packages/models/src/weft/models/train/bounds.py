"""Range checks for the fields of a configuration. Called from `__post_init__` of the classes in config.py.

In every function `where` is the option group named in errors ("data", "mesh", ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable

LARGEST = 2**31 - 1  # upper bound of the counts and sizes of a run: steps, sequences, tokens, ...


def check_at_least(where: str, config: object, least: int, *names: str) -> None:
    """Raise ValueError unless each named field of `config` is a finite number >= `least`."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: value >= least, f"{least} or more")


def check_above_zero(where: str, config: object, *names: str) -> None:
    """Raise ValueError unless each named field of `config` is a finite number > 0."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: value > 0, "above 0")


def check_decay_rates(where: str, config: object, *names: str) -> None:
    """Raise ValueError unless each named field is in [0, 1). At a decay of 1 an average would ignore every gradient."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: 0 <= value < 1, "0 or more, and below 1")


def check_at_most(where: str, config: object, most: int, *names: str) -> None:
    """Raise ValueError unless each named field is None or in [-most, most]."""
    for name in names:
        value = getattr(config, name)
        if value is not None and abs(value) > most:
            shown = f"{value}" if isinstance(value, float) or abs(value) < 10**20 else "a number of many digits"
            raise ValueError(f"{where}.{name} is {shown}; it must be {most:,} or less")


def _check(where: str, name: str, value: float, fits: Callable[[float], bool], words: str) -> None:
    if not (math.isfinite(value) and fits(value)):
        raise ValueError(f"{where}.{name} is {value}; it must be {words}")
