"""Where Weft stands, in four tiles: the most telling figures of the newest run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.dashboard.figures import is_rival
from benchmarks.dashboard.tables import short, times
from benchmarks.figures import TIMES, by_baseline
from benchmarks.record import Case, Run, printable

TILES = 4
STEP = "step_time"  # the group of the step whose collectives are told, of several
SHOWN = {  # of the case where a baseline has the most over Weft's
    "peak_bytes": "Memory held above inputs and gradients",
    "bytes_over_bound_mean": "Bytes of layout changes ÷ fewest possible, mean",
    "bytes_a_logit": "Bytes moved a bf16 logit; 6 are needed",
    "collectives": "Collectives of a training step",
}


class Tile(NamedTuple):
    label: str
    value: str
    beside: str


def tiles(run: Run) -> list[Tile]:
    """The first four tiles that the run has figures for, kernel times first."""
    measured = [case for case in run.cases if case.status == "measured"]
    timed = [case for case in measured if case.kind == "time"]
    found = [_roofline(timed), _speed(timed), *(_figure(label, measured) for label in SHOWN)]
    return [tile for tile in found if tile][:TILES]


def _roofline(timed: Sequence[Case]) -> Tile | None:
    shares = [case.numbers["roofline"] for case in timed if case.way == "Weft" and "roofline" in case.numbers]
    value = " to ".join(dict.fromkeys(f"{end(shares, default=0):.0%}" for end in (min, max)))
    return (
        Tile("Share of the roofline", value, f"of {len(shares)} shapes; a copy of the data, or its GEMMs, is 100%")
        if shares
        else None
    )


def _speed(timed: Sequence[Case]) -> Tile | None:
    found = by_baseline([case for case in timed if is_rival(case, timed)])
    means = {
        way: statistics.geometric_mean(each[TIMES["time"]]) for way, each in found.items() if TIMES["time"] in each
    }
    if not means:
        return None
    first = "eager torch" if "eager torch" in means else max(means, key=lambda way: means[way])
    rest = [
        f"{printable(way)} {times(means[way])}" for way in sorted(means, key=lambda way: -means[way]) if way != first
    ]
    beside = "; ".join(["geometric means of the shapes that each computes", *rest])
    return Tile(f"Time of {printable(first)} ÷ Weft's", times(means[first]), beside)


def _figure(label: str, measured: Sequence[Case]) -> Tile | None:
    """Weft's figure of one case, the baselines' of the same case, and Weft's largest figure."""
    weft = {case.key[:2]: case.numbers[label] for case in measured if case.way == "Weft" and case.numbers.get(label)}
    rivals = [case for case in measured if not case.ours and case.key[:2] in weft and is_rival(case, measured)]
    rivals = [case for case in rivals if case.numbers.get(label)]
    if not rivals:
        return None
    most = max(
        rivals, key=lambda case: (case.group == STEP, case.numbers[label] / weft[case.key[:2]], case.numbers[label])
    )
    own, name = weft[most.key[:2]], printable(most.name)
    theirs = sorted((case.numbers[label], case.way) for case in rivals if case.key[:2] == most.key[:2])
    beside = [f"{printable(way)} {_short(label, number)}" for number, way in theirs]
    others = [number for key, number in weft.items() if key[0] == most.group]
    told = [f"{name}; at most {_short(label, max(others))} in {len(others)} cases"] if max(others) > own else [name]
    return Tile(SHOWN[label], _short(label, own), "; ".join([*beside, *told]))


def _short(label: str, value: float) -> str:
    return times(value) if "over_bound" in label else f"{value:.2f} B" if "bytes_a" in label else short(label, value)
