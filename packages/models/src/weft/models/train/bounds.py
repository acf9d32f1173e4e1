"""The bounds of a run's numbers, checked when a configuration is made."""

from __future__ import annotations

import math
from collections.abc import Callable


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


def _check(where: str, name: str, value: float, fits: Callable[[float], bool], words: str) -> None:
    if not (math.isfinite(value) and fits(value)):
        raise ValueError(f"{where}.{name} is {value}; it must be {words}")
