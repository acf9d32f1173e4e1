"""In how many parts heads can be cut."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_head_degrees(heads: Mapping[str, int], *, cp: int, tp: int) -> None:
    """Raises ValueError where numbers of heads, by what has them, are no multiples of tp x cp, naming the cp that work."""
    ways = tp * cp
    misfits = [f"{name} {count}" for name, count in heads.items() if count % ways]
    if misfits:
        most = math.gcd(*heads.values())
        works = ", ".join(str(n) for n in divisors(most) if most % (tp * n) == 0) or f"none beside tp={tp}"
        raise ValueError(
            f"context 'ulysses' cuts heads over tp x cp = {tp} x {cp}, which does not divide {' and '.join(misfits)}; cp that "
            f"work: {works}; context 'all_gather' takes any"
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
