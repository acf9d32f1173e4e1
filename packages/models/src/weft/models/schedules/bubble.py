"""The schedules by name, and the share of time that each leaves idle."""

from __future__ import annotations

from typing import Literal, get_args

Name = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
NAMES: tuple[Name, ...] = get_args(Name)


def bubble_formula(name: Name, *, ranks: int, microbatches: int, chunks: int = 1) -> tuple[int, int]:
    """The share of a rank's time that is idle as (idle, all) in slots, where F and the halves of a backward take one each.

    GPipe and 1F1B: (p-1)/(m+p-1); interleaved: (p-1)/(v m+p-1); zero_bubble: (p-1)/(3m+p-1). For as many microbatches as
    ranks, or more.
    """
    idle = ranks - 1
    match name:
        case "zero_bubble":
            return idle, 3 * microbatches + idle
        case "interleaved":
            return 3 * idle, 3 * (chunks * microbatches + idle)
    return 3 * idle, 3 * (microbatches + idle)
