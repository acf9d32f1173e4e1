"""The order of samples: a permutation by a key, and the turns of several sources. Neither stores a list of samples."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

# Rounds of the Feistel network; four of pseudorandom functions give a pseudorandom permutation (Luby, Rackoff 1988).
ROUNDS = 6
ALL = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio, the increment of SplitMix64
MOST_TURNS = 100_000  # of a period, which is then found within a second


def permute(place: int, count: int, key: int) -> int:
    """The image of `place` under the permutation of 0 .. count - 1 given by the 64-bit key.

    A Feistel network permutes the numbers below a power of 4. An image of `count` or more goes through the network
    again until it is below (cycle-walking, Black and Rogaway 2002): on average at most four times.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right ^ (key + number * GOLDEN) & ALL) & mask)
        place = (left << half) | right
        if place < count:
            return place


def _mix(value: int) -> int:
    """A hash of 64 bits in which each bit depends on every bit of `value` (the finalizer of SplitMix64, Steele et
    al. 2014).
    """
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & ALL
    return value ^ (value >> 31)


class Turns:
    """The source of each sample, by weight: of the first n samples, source s has n * weight(s), rounded down or up,
    for every n.

    The turns repeat with the weights' common denominator. Of the sources not ahead of their share, the next is the
    source whose turn is due first (Baruah et al. 1996, proportionate progress).
    Raises ValueError for weights that repeat after more than MOST_TURNS samples.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        self._period = lcm(*(share.denominator for share in shares))
        if self._period > MOST_TURNS:
            raise ValueError(
                f"the weights {', '.join(map(str, weights))} repeat after {self._period} samples, above {MOST_TURNS}; "
                f"give weights of fewer digits"
            )
        self._of_period = [int(share * self._period) for share in shares]
        self._sources, self._numbers = _turns(tuple(self._of_period))

    def __call__(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of earlier samples from this source."""
        periods, turn = divmod(sample, self._period)
        source = int(self._sources[turn])
        return source, periods * self._of_period[source] + int(self._numbers[turn])


@lru_cache(maxsize=4)
def _turns(of_period: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each turn of a period: the source, and the number of earlier turns of this source.

    of_period: the number of turns of each source in a period.
    """
    period = sum(of_period)
    num_drawn = [0] * len(of_period)
    sources, numbers = np.empty(period, dtype=np.int64), np.empty(period, dtype=np.int64)
    for turn in range(period):
        released = [
            s for s, count in enumerate(of_period) if num_drawn[s] < count and num_drawn[s] * period // count <= turn
        ]
        source = min(released, key=lambda s: -(-(num_drawn[s] + 1) * period // of_period[s]))
        sources[turn], numbers[turn] = source, num_drawn[source]
        num_drawn[source] += 1
    return sources, numbers
