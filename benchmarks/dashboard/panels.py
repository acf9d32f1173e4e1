"""Charts of a group of cases, small multiples of one kind: ratios to Weft, shares of the roofline, memory, counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.dashboard import charts
from benchmarks.dashboard.charts import Datum, Spec
from benchmarks.dashboard.headline import is_rival
from benchmarks.dashboard.tables import means, named, noise, spread_of, times, ways
from benchmarks.figures import TIMES, ordered, quantity
from benchmarks.record import Case, printable

FEW = 6  # cases of host time, of which each has charts of its own; a kernel's shapes always have
BESIDE_TIMES = {
    "roofline": "share of the roofline; more",
    "peak_bytes": "memory above inputs and gradients; less",
    "collectives": "collectives issued; less",
}
CHARTED = ("bytes_a_logit", "peak_bytes", "bytes_over_bound_max")  # of counted figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """title: of what.  note: which figure.  told: the chart in words, for whoever does not see it."""

    title: str
    note: str
    told: str
    spec: Spec
    wide: bool = False


def of_times(cases: Sequence[Case]) -> list[Figure]:
    """Of a kernel's shapes, and of few host times: each way over Weft's, and what else is told of it. Of many: the spread."""
    by_name = {name: list(each) for name, each in itertools.groupby(cases, key=lambda case: case.name)}
    compared = {
        name: each for name, each in by_name.items() if len(each) > 1 and any(case.way == "Weft" for case in each)
    }
    if cases and cases[0].kind == "host_time" and len(compared) > FEW:
        return _spread([case for each in compared.values() for case in each])
    figures = [figure for name, each in compared.items() for figure in _side_by_side(name, each)]
    in_forms = {name: each for name, each in by_name.items() if len(each) > 1 and name not in compared}
    figures += [_durations(name, _in_order(each), lambda case: case.way) for name, each in in_forms.items()]
    if alone := [each[0] for each in by_name.values() if len(each) == 1]:
        whose = ", ".join(ordered(case.way for case in alone))
        figures.append(_durations(whose, alone, _name_and_way))
    return figures


def of_counts(cases: Sequence[Case]) -> list[Figure]:
    """Of each charted figure, on one scale: a chart for each case counted in several ways, one for the others together."""
    figures = []
    for label in CHARTED:
        some = [case for case in cases if label in case.numbers]
        most = max((case.numbers[label] for case in some), default=0)
        by_name = {name: list(each) for name, each in itertools.groupby(some, key=lambda case: case.name)}
        several = {name: each for name, each in by_name.items() if len(each) > 1}
        alone = [each[0] for each in by_name.values() if len(each) == 1]
        figures += [_amounts(name, label, each, most, lambda case: case.way) for name, each in several.items()]
        if alone:
            whose = ", ".join(ordered(printable(case.way) for case in alone))
            title = f"{whose}, other cases" if several else whose
            figures.append(_amounts(title, label, alone, most, lambda case: case.name))
    return figures


def over_bound(cases: Sequence[Case]) -> list[Figure]:
    """A chart for each mesh and shape, on one scale: the mean of each engine, and a line to its most."""
    some = [case for case in cases if {"bytes_over_bound_mean", "bytes_over_bound_max"} <= case.numbers.keys()]
    most = max((case.numbers["bytes_over_bound_max"] for case in some), default=1)
    figures = []
    for name, of_name in itertools.groupby(some, key=lambda case: case.name):
        data = []
        for case in _in_order(of_name):
            mean, largest = case.numbers["bytes_over_bound_mean"], case.numbers["bytes_over_bound_max"]
            text = f"{mean:.2f}, at most {largest:.3g}"
            data.append(_datum(case.way, text, mean, mean, largest, ours=case.ours))
        told = f"Bytes received over the bound, {name}: {_told(data)}."
        figures.append(_figure(name, "mean, and at most", told, charts.rows(data, charts.bound_axis(most), origin=1)))
    return figures


def _side_by_side(name: str, cases: Sequence[Case]) -> Iterator[Figure]:
    weft = next(case for case in cases if case.way == "Weft")
    clock = TIMES[weft.kind] if weft.kind == "time" else "host time"
    data = []
    for case in _in_order(cases):
        low, high = (1.0, 1.0) if case is weft else noise(case, weft)
        ratio = case.seconds.median / weft.seconds.median
        detail = f"{quantity('time', case.seconds.median)} ({spread_of(case) or 'no spread told'})"
        measure = "" if is_rival(case, cases) else " (not a rival: a measure)"
        data.append(
            _datum(
                case.way,
                times(ratio),
                ratio,
                low,
                high,
                ours=case.ours,
                tip=f"{case.way}: {times(ratio)}, {detail}{measure}",
            )
        )
    axis = charts.ratio_axis([each[key] for each in data for key in ("value", "low", "high")])
    note = f"{clock} over Weft's; less is better"
    yield _figure(name, note, f"{clock} over Weft's, {name}: {_told(data)}.", charts.rows(data, axis, origin=1))
    for label, words in BESIDE_TIMES.items():
        if any(label in case.numbers for case in cases):
            found = [_datum_of(case, label) if label in case.numbers else _without(case) for case in _in_order(cases)]
            most = max(case.numbers.get(label, 0) for case in cases)
            axis = charts.share_axis() if label == "roofline" else charts.amount_axis(most, _unit(label))
            told = f"{named(label)}, {name}: {_told(found)}."
            yield _figure(name, f"{words} is better", told, charts.rows(found, axis, origin=0))


def _durations(title: str, cases: Sequence[Case], naming: Callable[[Case], str]) -> Figure:
    """Times that are not over Weft's: of a case alone, or of forms of which none is Weft's own."""
    data = []
    for case in cases:
        spread = case.seconds
        text = quantity("time", spread.median)
        data.append(_datum(naming(case), text, spread.median, spread.p20, spread.p80, ours=case.ours))
    note = "host time" if cases[0].kind == "host_time" else "time"
    axis = charts.seconds_axis([each[key] for each in data for key in ("low", "high")])
    return _figure(title, note, f"{note}, {title}: {_told(data)}.", charts.rows(data, axis), wide=True)


def _name_and_way(case: Case) -> str:
    return case.name if case.way == "Weft" else f"{case.name}, {case.way}"


def _spread(cases: Sequence[Case]) -> list[Figure]:
    data: list[Datum] = []
    by_way: dict[str, list[tuple[str, float]]] = {}
    weft = {case.name: case.seconds.median for case in cases if case.way == "Weft"}
    for case in cases:
        if case.way != "Weft":
            by_way.setdefault(case.way, []).append((case.name, case.seconds.median / weft[case.name]))
    of_each = means(cases)
    for way in ordered(by_way):
        each = {"label": printable(way), "ours": way.startswith("Weft")}
        data += [
            each | {"value": ratio, "mean": None, "tip": printable(f"{name}: {times(ratio)}")}
            for name, ratio in by_way[way]
        ]
        if way in of_each:
            text = f"mean {times(of_each[way])}"
            data.append(
                each
                | {"mean": of_each[way], "text": text, "tip": printable(f"{way}: {text}, of {len(by_way[way])} cases")}
            )
    if not data:
        return []
    note = "host time over Weft's: a tick for each case, a diamond at the geometric mean"
    axis = charts.ratio_axis([ratio for some in by_way.values() for _, ratio in some])
    told = (
        f"{note}. " + "; ".join(f"{each['label']}: {each['text']}" for each in data if each["mean"] is not None) + "."
    )
    title = f"{len(weft)} cases"
    return [Figure(title=title, note=note, told=told, spec=charts.spread(data, axis), wide=True)]


def _amounts(title: str, label: str, cases: Sequence[Case], most: float, naming: Callable[[Case], str]) -> Figure:
    data = [_datum_of(case, label, naming(case)) for case in _in_order(cases)]
    axis = charts.amount_axis(most, _unit(label))
    return _figure(
        title,
        f"{named(label)}; less is better",
        f"{named(label)}, {title}: {_told(data)}.",
        charts.rows(data, axis, origin=0),
    )


def _unit(label: str) -> str:
    return "B" if label.endswith("bytes") else ""


def _figure(title: str, note: str, told: str, spec: Spec, *, wide: bool = False) -> Figure:
    return Figure(title=printable(title), note=note, told=printable(told), spec=spec, wide=wide)


def _datum_of(case: Case, label: str, shown: str = "") -> Datum:
    value = case.numbers[label]
    text = f"{value:.2f}" if label == "bytes_a_logit" else quantity(label, value)
    return _datum(shown or case.way, text, value, value, value, ours=case.ours)


def _without(case: Case) -> Datum:
    """A row of its own all the same, so that the charts of a case stand in line."""
    none = dict.fromkeys(("value", "low", "high"))
    return {
        "label": printable(case.way),
        "text": "–",
        "tip": printable(f"{case.way}: not told"),
        "ours": case.ours,
        **none,
    }


def _datum(label: str, text: str, value: float, low: float, high: float, *, ours: bool, tip: str = "") -> Datum:
    numbers: Mapping[str, float] = {"value": value, "low": low, "high": high}
    words = {"label": printable(label), "text": text, "tip": printable(tip or f"{label}: {text}")}
    return {**words, **numbers, "ours": ours}


def _told(data: Sequence[Datum]) -> str:
    return "; ".join(f"{each['label']} {each['text']}" for each in data)


def _in_order(cases: Iterable[Case]) -> list[Case]:
    some = list(cases)
    places = {way: at for at, way in enumerate(ways(some))}
    return sorted(some, key=lambda case: places[case.way])
