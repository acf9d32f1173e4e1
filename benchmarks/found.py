"""Checks and times ways to compute a loss, measures their memory, and prints a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.launched import cost
from benchmarks.losses import Made, Ways, may_be_captured
from benchmarks.record import ours
from benchmarks.timing import Clock, Way, in_turn
from benchmarks.truth import Truth, errors

Row = dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The roofline: the least work of a way, at the measured rate of a call which does only such work.

    A way at this rate has 100% of the roofline.
    """

    told: str  # the least work, in words
    call: str  # the name of the call
    unit: str  # "bytes" or "flop"
    done: int  # the work of the call, in units
    needed: int  # the least work of a way, in units

    def of(self, row: Row, rows: Mapping[str, Row]) -> Row:
        """The figures of a way: rate, and the share of the roofline if the call was timed by the same timer."""
        seconds, call = float(row["seconds_median"]), rows.get(self.call)
        figures: Row = {self.unit: self.needed, f"{self.unit}_per_second": self.needed / seconds}
        if call is None or call["timer"] != row["timer"]:
            return figures
        return figures | {"roofline": self.needed / self.done * float(call["seconds_median"]) / seconds}

    def __str__(self) -> str:
        return f"100% of the roofline: {self.told}, at the rate of {self.call!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The results of a case: the figures of each way to compute the case."""

    case: str
    rows: Mapping[str, Row]  # by way
    absent: Sequence[str]  # ways whose package is not installed
    failed: Mapping[str, str]  # the reason of each failed way
    measures: Sequence[Measure]

    def roofline(self, way: str) -> float:
        """The way's share of the roofline.

        Raises AssertionError if the way and the roofline's call had different timers.
        """
        row = self.rows[way]
        assert "roofline" in row, (
            f"{way} was timed by {row['timer']}, and the call of the roofline was not: see the table"
        )
        return float(row["roofline"])

    def __str__(self) -> str:
        """The results as a table."""
        head = f"{'':42}{'ms':>9}{'p20 to p80':>18}{'timer':>8}{'of roofline':>15}{'GB above inputs and gradients':>31}"
        lines = [f"{self.case}: forward and backward", head, *map(self._line, self.rows)]
        lines += [f"{name:42}not installed" for name in self.absent]
        lines += [f"{name:42}failed: {error}" for name, error in self.failed.items()]
        if len({row["timer"] for row in self.rows.values()}) > 1:
            lines.append(
                "times by events may include waits for the host, times by graph do not: do not compare the two"
            )
        return "\n".join([*lines, *map(str, self.measures)])

    def _line(self, way: str) -> str:
        row = self.rows[way]
        needed = any(measure.unit in row for measure in self.measures)
        share = f"{row['roofline']:.1%}" if "roofline" in row else "another timer" if needed else ""
        held = f"{float(row['peak_bytes']) / 1e9:.3f}" if "peak_bytes" in row else ""
        median, p20, p80 = (float(row[f"seconds_{which}"]) * 1e3 for which in ("median", "p20", "p80"))
        spread = f"{p20:.3f} to {p80:.3f}"
        return f"{way:42}{median:9.3f}{spread:>18}{row['timer']:>8}{share:>15}{held:>31}"

    def tell_all(self, tell: Callable[..., None]) -> None:
        for way, row in self.rows.items():
            tell(self.case, way, "time", **row)
        for way in self.absent:
            tell(self.case, way, "time", status="absent")
        for way, error in self.failed.items():
            tell(self.case, way, "time", status="failed", error=error)


def measured(
    ways: Ways, truth: Truth, calls: Mapping[str, Way], measure: Measure, clock: Clock, *, rounds: int, sets: int
) -> dict[str, Row]:
    """Checks and times all ways and the roofline's calls. Failed ways are added to `ways.failed`.

    calls: the calls of the roofline. sets: the number of sets of operands, which ways take in turn.
    Returns a row for each way and call: the seconds and the timer; on a GPU also the peak bytes above inputs and
    gradients.
    A way's row also has the errors, the share of the roofline, and on a GPU the compiled cost of Weft's kernels.
    Raises Inaccurate and all other errors of Weft's ways.
    """
    errs: dict[str, dict[str, float]] = {}
    for name, way in ways.made.items():
        with ways.failed.of(name):
            errs[name] = errors(name, way(), truth)
    right: dict[str, Way] = {**calls, **{name: ways.made[name] for name in errs}}
    replayed = [name for name in right if name in calls or may_be_captured(name)]
    times = in_turn(right, clock, rounds=rounds, calls=sets, replayed=replayed, guard=ways.failed.of)
    rows: dict[str, Row] = {name: {**each.figures} for name, each in times.items()}
    for name in times if torch.cuda.is_available() else ():
        with ways.failed.of(name):
            rows[name] |= held(right[name]) | (cost(right[name]) if ours(name) else {})
    rows = {name: row for name, row in rows.items() if name not in ways.failed}
    for name in rows.keys() & errs.keys():
        rows[name] |= measure.of(rows[name], rows) | errs[name]
    return rows


def held(way: Way) -> Row:
    """The peak bytes of a call on a GPU, above earlier tensors and returned gradients; and the bytes of the gradients.

    Counts requested bytes. Allocated bytes are rounded up, by an amount which depends on earlier calls.
    """
    torch.cuda.synchronize()
    before = _requested("current")
    torch.cuda.reset_peak_memory_stats()
    made = way()
    torch.cuda.synchronize()
    gradients = sum(each.nbytes for each in made.gradients) if isinstance(made, Made) else 0
    return {"peak_bytes": _requested("peak") - before - gradients, "gradient_bytes": gradients}


def _requested(which: str) -> int:
    nbytes: int = torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
    return nbytes
