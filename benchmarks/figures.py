"""The figures of a case to show, with units, and the ratios to Weft's: for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks.record import Case, ours

TIMES = {"time": "time", "host_time": "time of the host"}
SHOWN = ("roofline", "peak_bytes")  # beside a time; of a counted case all numbers are shown
UNITS = {"bytes": "B", "bytes_per_second": "B/s", "flop": "flop", "flop_per_second": "flop/s"}  # by how a label ends
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def quantity(label: str, value: float, digits: int = 4) -> str:
    """A value with unit: "1.23 ms" for a time, "4.2 GB" for bytes, "780 Tflop/s", "91.0%" for a roofline."""
    if label == "roofline":
        return f"{value:.1%}"
    unit = "s" if label in TIMES.values() else next((unit for end, unit in UNITS.items() if label.endswith(end)), "")
    if not unit:
        return f"{value:.6g}"
    factor, prefix = next((each for each in PREFIXES if abs(value) >= each[0]), (1.0, ""))
    return f"{value / factor:.{digits}g} {prefix}{unit}"


def figures(case: Case) -> dict[str, float]:
    """The shown figures of a measured case, by label; empty for a case not measured."""
    if case.status != "measured":
        return {}
    if case.kind == "count":
        return dict(sorted(case.numbers.items()))
    shown = {key: case.numbers[key] for key in SHOWN if key in case.numbers}
    return {TIMES[case.kind]: case.seconds.median, **shown}


def every_figure(case: Case) -> dict[str, float]:
    """`figures`, with counts beside a time and with the points of curves."""
    rest = {key: value for key, value in sorted(case.all_numbers()) if not key.startswith("seconds")}
    return figures(case) | rest if case.status == "measured" else {}


def place(way: str) -> tuple[bool, bool, str]:
    """A sort key: Weft first, then forms of Weft, then baselines."""
    return way != "Weft", not ours(way), way


def ordered(ways: Iterable[str]) -> list[str]:
    """Each way once."""
    return sorted(set(ways), key=place)


def ratios(
    cases: Sequence[Case], of: Callable[[Case], Mapping[str, float]] = figures
) -> Iterator[tuple[Case, str, float]]:
    """Each figure over Weft's, for every way but Weft; not for the roofline, which is a ratio already."""
    weft = {(case.group, case.name): of(case) for case in cases if case.way == "Weft"}
    for case in cases:
        for label, value in of(case).items():
            own = weft.get((case.group, case.name), {}).get(label)
            if case.way != "Weft" and label != "roofline" and own and value / own > 0:
                yield case, label, value / own


def other_timer(case: Case, weft: Case | None, label: str) -> str:
    """The words " by TIMER" for a time by a different timer than Weft's, whose ratio says little; otherwise none."""
    timer = case.figures.get("timer")
    if label not in TIMES.values() or weft is None or timer == weft.figures.get("timer", timer):
        return ""
    return f" by {timer}"


def by_baseline(cases: Sequence[Case]) -> dict[str, dict[str, list[float]]]:
    """Baseline -> label -> ratios to Weft's, without times by different timers."""
    found: dict[str, dict[str, list[float]]] = {}
    weft = {(case.group, case.name): case for case in cases if case.way == "Weft"}
    for case, label, ratio in ratios(cases):
        if not case.ours and not other_timer(case, weft.get((case.group, case.name)), label):
            found.setdefault(case.way, {}).setdefault(label, []).append(ratio)
    return found
