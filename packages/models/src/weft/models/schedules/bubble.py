"""The names of pipeline schedules, and the share of time that each leaves idle."""

from __future__ import annotations

from typing import Literal, get_args

Name = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
NAMES: tuple[Name, ...] = get_args(Name)


def bubble_formula(name: Name, *, ranks: int, microbatches: int, chunks: int = 1) -> tuple[int, int]:
    """The idle share of a rank's time as (idle, all), in slots: a forward, and each half of a backward, takes a slot.

    With p ranks, m microbatches and v chunks: GPipe and 1F1B (p-1)/(m+p-1); interleaved (p-1)/(v m+p-1);
    zero_bubble (p-1)/(3m+p-1). Valid where m is p or more.
    """
    idle = ranks - 1
    match name:
        case "zero_bubble":
            return idle, 3 * microbatches + idle
        case "interleaved":
            return 3 * idle, 3 * (chunks * microbatches + idle)
    return 3 * idle, 3 * (microbatches + idle)
