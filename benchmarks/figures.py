"""What is shown of a case, with its unit, and its ratio to Weft's: the same in Markdown and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks.record import Case, ours

TIMES = {"time": "time", "host_time": "time of the host"}
SHOWN = ("roofline", "peak_bytes")  # beside a time; a counted case shows all its numbers
UNITS = {"bytes": "B", "bytes_per_second": "B/s", "flop": "flop", "flop_per_second": "flop/s"}  # by how a label ends
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def quantity(label: str, value: float, digits: int = 4) -> str:
    """With its unit: "1.23 ms" for a time, "4.2 GB" for bytes, "780 Tflop/s", "91.0%" for a roofline."""
    if label == "roofline":
        return f"{value:.1%}"
    unit = "s" if label in TIMES.values() else next((unit for end, unit in UNITS.items() if label.endswith(end)), "")
    if not unit:
        return f"{value:.6g}"
    factor, prefix = next((each for each in PREFIXES if abs(value) >= each[0]), (1.0, ""))
    return f"{value / factor:.{digits}g} {prefix}{unit}"


def figures(case: Case) -> dict[str, float]:
    """What is shown of a measured case, by its label."""
    if case.status != "measured":
        return {}
    if case.kind == "count":
        return dict(sorted(case.numbers.items()))
    shown = {key: case.numbers[key] for key in SHOWN if key in case.numbers}
    return {TIMES[case.kind]: case.seconds.median, **shown}


def every_figure(case: Case) -> dict[str, float]:
    """The same, what else was counted beside a time, and the points of curves."""
    rest = {key: value for key, value in sorted(case.all_numbers()) if not key.startswith("seconds")}
    return figures(case) | rest if case.status == "measured" else {}


def place(way: str) -> tuple[bool, bool, str]:
    """To sort by: Weft, its forms, the baselines."""
    return way != "Weft", not ours(way), way


def ordered(ways: Iterable[str]) -> list[str]:
    """Each way once."""
    return sorted(set(ways), key=place)


def ratios(
    cases: Sequence[Case], of: Callable[[Case], Mapping[str, float]] = figures
) -> Iterator[tuple[Case, str, float]]:
    """Of each way but Weft, each figure over Weft's; a share of the roofline is a ratio already."""
    weft = {(case.group, case.name): of(case) for case in cases if case.way == "Weft"}
    for case in cases:
        for label, value in of(case).items():
            own = weft.get((case.group, case.name), {}).get(label)
            if case.way != "Weft" and label != "roofline" and own and value / own > 0:
                yield case, label, value / own


def other_timer(case: Case, weft: Case | None, label: str) -> str:
    """Where a time was not taken as Weft's was, by what it was: their ratio says little."""
    timer = case.figures.get("timer")
    if label not in TIMES.values() or weft is None or timer == weft.figures.get("timer", timer):
        return ""
    return f" by {timer}"


def by_baseline(cases: Sequence[Case]) -> dict[str, dict[str, list[float]]]:
    """Of each baseline, by label: its ratios to Weft, but of times by another timer."""
    found: dict[str, dict[str, list[float]]] = {}
    weft = {(case.group, case.name): case for case in cases if case.way == "Weft"}
    for case, label, ratio in ratios(cases):
        if not case.ours and not other_timer(case, weft.get((case.group, case.name)), label):
            found.setdefault(case.way, {}).setdefault(label, []).append(ratio)
    return found
