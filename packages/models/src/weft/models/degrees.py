"""The degrees of parallelism that divide numbers of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_head_degrees(heads: Mapping[str, int], *, cp: int, tp: int) -> None:
    """Raises ValueError, with the cp that work, unless tp x cp divides each number of heads. heads: kind -> number."""
    ways = tp * cp
    misfits = [f"{name} {count}" for name, count in heads.items() if count % ways]
    if misfits:
        most = math.gcd(*heads.values())
        works = ", ".join(str(n) for n in divisors(most) if most % (tp * n) == 0) or f"none beside tp={tp}"
        raise ValueError(
            f"context 'ulysses' cuts heads over tp x cp = {tp} x {cp}, which does not divide "
            f"{' and '.join(misfits)}; cp that work: {works}; context 'all_gather' takes any"
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
