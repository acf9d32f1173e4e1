"""Charts as Vega-Lite specs, drawn into SVG when the page is made. Colours are variables of the page's style sheet.

There are two kinds: `strip` has a row of marks for each way, `lines` a value over steps or runs. A mark's tip becomes
a <title>, which browsers show under the pointer. Names from the results are data, never a field's name, an expression
or a title: Vega writes data as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import vl_convert
from markupsafe import Markup, escape

from benchmarks.record import ours, printable

Spec = dict[str, Any]
Datum = dict[str, Any]
WIDTH, ROW = 340, 40  # pixels: a phone's width; a line of text and the marks under it
LETTER = 8.5  # pixels, at most, of what stands in bold
SERIES = [f"var(--{name})" for name in ("weft", "two", "three", "four", "five", "six", "seven", "eight")]
SHAPES = ["circle", "diamond", "square", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left"]
INK, QUIET, LINE, PAGE = (f"var(--{name})" for name in ("ink", "quiet", "line", "page"))
CONFIG = {
    "background": "transparent", "font": "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif",
    "padding": {"left": 6, "right": 12, "top": 2, "bottom": 2}, "view": {"stroke": None},
    "axis": {
        "aria": False, "labelColor": QUIET, "titleColor": QUIET, "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": 400, "gridColor": LINE, "domainColor": LINE, "tickColor": LINE, "labelPadding": 4,
    },
    "legend": {
        "aria": False, "orient": "top", "direction": "vertical", "title": None, "labelColor": INK, "labelFontSize": 12,
        "labelLimit": 300, "symbolOpacity": 1,
    },
    "style": {
        "label": {"fontSize": 12, "align": "left", "baseline": "middle", "color": INK, "dy": -14},
        "value": {"fontSize": 12, "align": "right", "baseline": "middle", "color": INK, "dy": -14, "fontWeight": 600},
        "mean": {"filled": True, "shape": "diamond", "size": 90, "opacity": 1, "stroke": PAGE, "color": INK},
        "origin": {"color": QUIET, "thickness": 1.5, "size": 15, "opacity": 1},
        "case": {"thickness": 2, "size": 12, "opacity": 0.75},
        "share": {"filled": True, "opacity": 0.6},
        "point": {"filled": True, "size": 26},
    },
}  # fmt: skip


class Row(NamedTuple):
    """One row of a strip. marks: dicts with value, tip, and perhaps share (the mark's area).  text: on the right."""

    label: str
    marks: Sequence[Datum]
    text: str
    mean: float | None = None
    way: str = ""  # for the colour, where the label is a case


class Figure(NamedTuple):
    """A chart. title: which group.  note: which figure.  told: the chart in words, for screen readers."""

    title: str
    note: str
    told: str
    spec: Spec


def strip(title: str, note: str, rows: Sequence[Row], scale: Spec, origin: float | None = None) -> Figure:
    """A row for each label, with its text: a mark at each value, a diamond at the mean, a grey tick at the origin."""
    names = [printable(row.label) for row in rows]
    summed = [{"label": printable(row.label), "text": row.text, "mean": row.mean, "origin": origin} for row in rows]
    marks = [
        {**each, "label": printable(row.label), "ours": ours(row.way or row.label), "tip": printable(each["tip"])}
        for row in rows
        for each in row.marks
    ]
    who: Spec = {"field": "ours", "type": "nominal", "legend": None}
    form: Spec = {}
    mark = ("tick", "case")
    if any("share" in each for each in marks):
        mark = ("point", "share")
        area = {"domain": [0, 1], "range": [10, 220]}
        form["size"] = {"field": "share", "type": "quantitative", "legend": None, "scale": area}
        form["shape"] = {**who, "scale": {"domain": [True, False], "range": SHAPES[:2]}}
    colour = {**who, "scale": {"domain": [True, False], "range": SERIES[:2]}}
    limit = max(80, 0.86 * (WIDTH - LETTER * max((len(row.text) for row in rows), default=0)))  # fonts differ
    layers = [
        _layer("tick", "origin", x=_at(scale, "origin"), of="mean"),
        _layer(*mark, x=_at(scale, "value"), color=colour, of="value", **form),
        _layer("point", "mean", x=_at(scale, "mean"), of="mean"),
        _layer("text", "label", x={"value": 0}, text={"field": "label"}, of="text"),
        _layer("text", "value", x={"value": WIDTH}, text={"field": "text"}, of="text"),
    ]
    layers[0]["transform"] = [{"filter": "isValid(datum.origin)"}]
    layers[3]["mark"]["limit"] = limit
    for layer in layers:
        layer["encoding"]["y"] = {"field": "label", "type": "nominal", "scale": {"domain": names}, "axis": None}
    told = "; ".join(f"{row.label} {row.text}" for row in rows)
    return _figure(title, note, f"{title}, {note}: {told}.", [*summed, *marks], layers, ROW * len(rows))


def lines(
    title: str, note: str, points: Sequence[Datum], y: Spec, x: Spec | None, *, named: bool = False, height: int = 120
) -> Figure:
    """A line for each `name`, broken where `part` changes, in a band `low` to `high`; pale where `here` is false.

    points: name, x, value, tip; perhaps the others.  x: its axis, or none.  named: in their own colours, with a legend.
    """
    usual = {"low": None, "high": None, "part": 0, "here": True}
    some = [{**usual, **each, "name": printable(each["name"]), "tip": printable(each["tip"])} for each in points]
    names = list(dict.fromkeys(each["name"] for each in some))
    scale = {"domain": names, "range": SERIES if named else SERIES[:1]}
    colour = {"field": "name", "type": "nominal", "scale": scale, "legend": {} if named else None}
    across = {"field": "x", "type": "quantitative", "axis": None, "scale": {"nice": False, "padding": 6}, **(x or {})}
    opacity = 1 if len(names) < 9 else 0.4
    pale = {"condition": {"test": "datum.here", "value": opacity}, "value": opacity / 3}
    detail = [{"field": "name"}, {"field": "part"}]
    layers = [
        _layer("area", "", y=_at(y, "low"), y2={"field": "high"}, detail=detail, opacity={"value": 0.16}, of="low"),
        _layer("line", "", y=_at(y, "value"), detail=detail, opacity={"value": opacity}, of="x"),
        _layer("point", "point", y=_at(y, "value"), opacity=pale, of="value"),
    ]
    if named:  # told apart by form too
        layers[-1]["encoding"]["shape"] = {"field": "name", "type": "nominal", "scale": {**scale, "range": SHAPES}}
    for layer in layers:
        layer["encoding"] |= {"x": across, "color": colour}
    values = sorted(each["value"] for each in some)
    return _figure(title, note, f"{title}, {note}: {values[0]:.3g} to {values[-1]:.3g}.", some, layers, height)


def axis(values: Sequence[float], unit: str = "", *, log: bool = True, domain: Sequence[float] = ()) -> Spec:
    """Over the values, or the domain. unit: "×", "%", "e" for powers of ten, or one that gets SI prefixes."""
    formats = {"%": {"format": ".0%"}, "e": {"format": "~e"}, "×": {"labelExpr": "format(datum.value, '~g') + '×'"}}
    labels = formats.get(unit, {"labelExpr": f"format(datum.value, '~s') + '{unit}'"})
    made: Spec = {"grid": False, "labelOverlap": "greedy", "tickCount": 4, "title": None, **labels}
    low, high = domain or (min(values), max(values))
    if not log:
        return {"scale": {"domain": [low, high], "nice": not domain, "zero": unit == "e"}, "axis": made}
    low, high = (low, high) if domain else (low / 1.12, high * 1.12)
    return {
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {**made, "values": _ticks(low, high)},
    }


def svg(figure: Figure) -> Markup:
    """The chart as SVG: `told` is its only label for screen readers."""
    drawn: str = vl_convert.vegalite_to_svg(figure.spec)
    drawn = re.sub(r'<(\w+) aria-label="([^"]*)"([^>]*?)/>', r"<\1\3><title>\2</title></\1>", drawn)
    drawn = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", UNSAID.sub("", tag[0])), drawn)
    return Markup(drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(figure.told)}" ', 1))


UNSAID = re.compile(r' (?:role|aria-[a-z]+|class|pointer-events|stroke-miterlimit|xmlns:xlink|font-family)="[^"]*"')


def _layer(mark: str, style: str, of: str, **encoding: Any) -> Spec:
    """Marks for the rows with a field `of`; marks at values have tips."""
    told = {"description": {"field": "tip", "type": "nominal"}} if of == "value" else {}
    made: Spec = {"mark": {"type": mark, "style": style, "aria": bool(told)}, "encoding": {**encoding, **told}}
    return {**made, "transform": [{"filter": f"isValid(datum.{of})"}]}


def _at(scale: Mapping[str, Any], field: str) -> Spec:
    return {**scale, "field": field, "type": "quantitative"}


def _ticks(low: float, high: float) -> list[float]:
    """Ticks 1, 2, 5, 10 and so on from low to high; more on a short axis, only powers of ten on a long one."""
    fine = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    steps = (
        fine if high < 2 * low else (1, 1.5, 2, 3, 5, 7) if high < 6 * low else (1, 2, 5) if high < 300 * low else (1,)
    )
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [each for power in powers for step in steps if low <= (each := step * 10.0**power) <= high]


def _figure(title: str, note: str, told: str, data: Sequence[Datum], layers: list[Spec], height: int) -> Figure:
    spec = {"config": CONFIG, "data": {"values": list(data)}, "layer": layers, "width": WIDTH, "height": height}
    return Figure(printable(title), printable(note), printable(told), spec)
