"""What changed in the newest run beside those before it: each figure of Weft's, the worst first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.compare import Change, Comparison, timed_alike
from benchmarks.dashboard.past import Key, Past
from benchmarks.dashboard.sources import Device
from benchmarks.dashboard.tables import named, times
from benchmarks.figures import TIMES, quantity
from benchmarks.record import printable

SHOWN = 6  # lines; the rest is folded
COMPILED = "compiled"  # the group of what the compiler counts, which says little of how fast a kernel is


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A figure that changed. growth: now over before, above 1 is worse.  others: what became of the other ways.

    broken: whether it breaks a budget.  place: of its history among the page's; None where it has none.
    """

    growth: float
    broken: bool
    word: str
    name: str
    of: str
    before: str
    now: str
    others: str
    place: int | None

    @property
    def worse(self) -> bool:
        return self.growth > 1

    @property
    def shown(self) -> str:
        return "from 0" if self.growth == math.inf else times(self.growth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """sentence: in one.  beside: with what it was compared, and what not.  lines: worst first; compiled: apart from them."""

    sentence: str
    beside: str
    lines: tuple[Line, ...] = ()
    compiled: tuple[Line, ...] = ()

    @property
    def first(self) -> tuple[Line, ...]:
        return self.lines[:SHOWN]

    @property
    def rest(self) -> tuple[Line, ...]:
        return self.lines[SHOWN:]


def changed(device: Device, past: Past) -> Changed:
    where = "On a CPU" if device.is_cpu else f"On {printable(device.name)}"
    if device.comparison is None:
        return Changed(sentence=f"{where} nothing is compared: the budgets cannot be read.", beside="")
    if len(device.runs) == 1:
        return Changed(sentence=f"{where} there is one run, and none before it to compare with.", beside="")
    places = past.places()
    times_, counts = list(_times(device.comparison, places)), list(_counts(device.comparison, places))
    compared = sum(change.case.ours for change in device.comparison.changes)
    compiled = [line for line, group in counts if group == COMPILED]
    counted = [line for line, group in counts if group != COMPILED]
    told = [_told(times_, compared), _told_of_counts(counted)]
    return Changed(
        sentence=f"{where}: {', and '.join(filter(None, told))}.",
        beside=_beside(device),
        lines=_worst_first([*times_, *counted]),
        compiled=_worst_first(compiled),
    )


def _worst_first(lines: Sequence[Line]) -> tuple[Line, ...]:
    """What breaks a budget before all else."""
    return tuple(sorted(lines, key=lambda line: (not line.broken, -round(line.growth, 4), line.name, line.of)))


def _told(found: Sequence[Line], compared: int) -> str:
    if not compared:
        return "no time is compared"
    slower = sum(line.worse for line in found)
    if not found:
        return f"none of {compared} times changed beyond the noise"
    verb = "is" if slower == 1 else "are"
    return f"{slower or 'none'} of {compared} times {verb} slower than before, {len(found) - slower or 'none'} faster"


def _told_of_counts(found: Sequence[Line]) -> str:
    if not found:
        return "no counted figure changed"
    more = sum(line.worse for line in found)
    return f"of the counted figures {more or 'none'} grew and {len(found) - more or 'none'} fell"


def _times(comparison: Comparison, places: dict[Key, int]) -> Iterator[Line]:
    """Of Weft's beyond the noise; beside each how the others' times changed, who ran on the same machine."""
    for change in (change for change in comparison.changes if change.case.ours):
        case, (low, high) = change.case, change.noise
        if low <= 1 <= high:
            continue
        others = [each for each in comparison.changes if not each.case.ours and _alike(change, each)]
        growths = [1 / each.ratio for each in others]
        label = TIMES[case.kind]
        yield Line(
            growth=1 / change.ratio,
            broken=_broken(comparison, f"{case.title}: "),
            word="slower" if high < 1 else "faster",
            name=printable(case.name),
            of=printable(f"{case.way}, {named(label)}"),
            before=quantity("time", change.before.median),
            now=quantity("time", case.seconds.median),
            others=f"others {times(statistics.geometric_mean(growths))}" if growths else "no other way",
            place=places.get((case.group, case.name, label)),
        )


def _alike(one: Change, other: Change) -> bool:
    return (one.case.key[:2], one.case.kind) == (other.case.key[:2], other.case.kind)


def _broken(comparison: Comparison, start: str) -> bool:
    """Whether a line of the failures begins so: a group's names each of its cases."""
    return any(line.strip().startswith(start) for each in comparison.failures for line in each.splitlines())


def _counts(comparison: Comparison, places: dict[Key, int]) -> Iterator[tuple[Line, str]]:
    """What is the same to the digits that are shown is left out."""
    for each in comparison.counts:
        before, now = _short(each.label, each.before), _short(each.label, each.now)
        if before == now:
            continue
        yield (
            Line(
                growth=each.growth,
                broken=_broken(comparison, f"{each.case.title}: {each.label} is "),
                word="more" if each.growth > 1 else "less",
                name=printable(each.case.name),
                of=printable(f"{each.case.way}, {named(each.label)}"),
                before=before,
                now=now,
                others="counted",
                place=places.get((each.case.group, each.case.name, each.label)),
            ),
            each.case.group,
        )


def _short(label: str, value: float) -> str:
    """With its unit; of what has none, three digits."""
    told = quantity(label, value)
    return told if " " in told or isinstance(value, int) else f"{value:.3g}"


def _beside(device: Device) -> str:
    """With which runs times are compared, and what is left out."""
    earlier = list(device.runs.values())[:-1]
    found = {kind: len(timed_alike(device.newest, earlier, kind)) for kind in ("time", "host_time")}
    kinds = {case.kind for case in device.newest.cases if case.timed}
    told = [
        f"{'Kernel times' if kind == 'time' else 'Times of the host'} beside the median of {_several(found[kind])} "
        f"{'of this GPU' if kind == 'time' else 'on this machine'}"
        for kind in ("time", "host_time")
        if kind in kinds and found[kind]
    ]
    if "host_time" in kinds and found["host_time"] < len(earlier[-5:]):
        why = (
            "the machine of this run was not recorded"
            if device.newest.clock("host_time") is None
            else "other runs are of other machines, or of none that was recorded"
        )
        told.append(f"Times of the host are not compared: {why}" if not found["host_time"] else f"Not compared: {why}")
    told.append("Counted figures beside the newest run before that has them")
    return ". ".join(told) + "."


def _several(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
