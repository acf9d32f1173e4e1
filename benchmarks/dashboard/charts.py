"""Vega-Lite charts without colours of their own: the page gives them those of its theme.

Names from the results are data, never the name of a field, an expression or a title, so that Vega shows them as text.
Colour repeats what position, shape or dash says already.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

Spec = dict[str, Any]
Datum = dict[str, Any]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
SECONDS = "format(datum.value, '~s') + 's'"
ROW = 34  # pixels: a line of text, and the marks under it
LADDER = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
LETTER = 7.5  # pixels, at most, of what stands in bold
LEFT, RIGHT = (alt.value(at) for at in (0, "width"))


def rows(data: Sequence[Datum], x: alt.X, *, origin: float | None = None) -> Spec:
    """A row for each `label`: the label and `text` in a line, under it a mark at `value` and its noise, `low` to `high`.

    origin: from where a stem goes to the mark.  Data: label, text, value, low, high, ours, tip.
    """
    y = _y(data)
    base = _over([each | {"origin": origin} for each in data])
    layers = [base.mark_rule(style="noise").encode(x=_at(x, "low"), x2="high:Q", y=y, color=_ours())]
    if origin is not None:
        layers.append(base.mark_tick(style="reference", size=14).encode(x=_at(x, "origin"), y=y))
        layers.append(base.mark_rule(style="stem").encode(x=_at(x, "origin"), x2="value:Q", y=y, color=_ours()))
    layers.append(base.mark_point(style="mark").encode(x=x, y=y, color=_ours(), shape=_shape(), tooltip=_tip()))
    return _spec(alt.layer(*layers, *_labels(base, y, data)), _height(data, ROW))


def spread(data: Sequence[Datum], x: alt.X) -> Spec:
    """A row for each `label`, with a tick for each of its cases, and a mark at their mean."""
    y = _y(data)
    base = _over(data)
    cases, means = base.transform_filter("datum.mean == null"), base.transform_filter("datum.mean != null")
    ticks = cases.mark_tick(style="case", size=12).encode(x=x, y=y, color=_ours(), tooltip=_tip())
    mean = means.mark_point(style="mean", shape="diamond").encode(x=_at(x, "mean"), y=y, tooltip=_tip())
    return _spec(alt.layer(ticks, mean, *_labels(means, y, data)), _height(data, ROW))


def shares(data: Sequence[Datum], x: alt.X) -> Spec:
    """A row for each `label`: a mark for each ratio, its area the share of pairs that have it, and a tick at the mean."""
    y = _y(data)
    base = _over(data)
    marks, means = base.transform_filter("datum.mean == null"), base.transform_filter("datum.mean != null")
    size = alt.Size("share:Q").scale(domain=[0, 1], range=[10, 200]).legend(None)
    ratios = marks.mark_point(style="share").encode(x=x, y=y, size=size, color=_ours(), shape=_shape(), tooltip=_tip())
    mean = means.mark_tick(style="mean", size=16).encode(x=_at(x, "mean"), y=y)
    return _spec(alt.layer(ratios, mean, *_labels(means, y, data)), _height(data, ROW))


def points(data: Sequence[Datum], names: Sequence[str]) -> Spec:
    """A row for each `label`, a mark at each `value`, its form and colour those of `name`, a track for each name."""
    some = list(names)
    base = _over(data)
    y = _y(data)
    x = alt.X("value:Q").scale(zero=True, nice=True).axis(alt.Axis(tickCount=6)).title(None)
    track = alt.YOffset("name:N").scale(domain=[" ", *some])  # the first is the label's
    colour = alt.Color("name:N").scale(domain=some, range="category").legend(_legend("horizontal"))
    shape = alt.Shape("name:N").scale(domain=some, range=SHAPES).legend(_legend("horizontal"))
    marks = base.mark_point(style="mark").encode(x=x, y=y, yOffset=track, color=colour, shape=shape, tooltip=_tip())
    first = base.transform_aggregate(count="count()", groupby=["label"])
    labels = first.mark_text(style="label", dy=-6 * len(some)).encode(x=LEFT, y=y, text="label:N")
    return _spec(alt.layer(marks, labels), _height(data, 13 * (len(some) + 1)))


def ratio_axis(values: Sequence[float]) -> alt.X:
    """Logarithmic, with 1 on it."""
    low, high = 0.96 * min(0.95, *values), 1.04 * max(1.05, *values)
    return _x(_steps(low, high) if high > 4 * low else None, format="~g", tickCount=4).scale(
        type="log", domain=[low, high], nice=False
    )


def bound_axis(most: float) -> alt.X:
    """Doublings of the bound."""
    return _x(LADDER, format="~g").scale(type="log", base=2, domain=[0.9, max(2, most * 1.15)], nice=False)


def share_axis() -> alt.X:
    return _x([0, 0.25, 0.5, 0.75, 1], format=".0%").scale(domain=[0, 1.04], nice=False)


def amount_axis(most: float, unit: str = "") -> alt.X:
    """From zero, in SI prefixes; charts with the same `most` have the same scale."""
    axis = _x(None, labelExpr=f"format(datum.value, '~s') + '{unit}'", tickCount=4)
    return axis.scale(domain=[0, most or 1], nice=True)


def seconds_axis(values: Sequence[float]) -> alt.X:
    """Logarithmic, where times differ by orders."""
    low, high = min(values) / 1.5, max(values) * 1.5
    axis = _x(_steps(low, high), labelExpr=SECONDS)
    return axis.scale(type="log", domain=[low, high], nice=False)


def _x(values: Sequence[float] | None, **axis: Any) -> alt.X:
    """Each value is told in the row, so that no grid is needed."""
    ticks: dict[str, Any] = {} if values is None else {"values": list(values)}
    return alt.X("value:Q").axis(alt.Axis(grid=False, labelOverlap="greedy", **ticks, **axis)).title(None)


def _steps(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 and so on between the two; of many only the powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    some = [step * 10.0**power for power in powers for step in ((1, 2, 5) if len(powers) < 5 else (1,))]
    return [each for each in some if low <= each <= high]


def _over(data: Sequence[Datum]) -> alt.Chart:
    return alt.Chart({"values": list(data)})


def _y(data: Sequence[Datum]) -> alt.Y:
    """Rows in the order of the data, those without a number too."""
    return alt.Y("label:N").scale(domain=list(dict.fromkeys(each["label"] for each in data))).axis(None)


def _labels(base: alt.Chart, y: alt.Y, data: Sequence[Datum]) -> list[alt.Chart]:
    """A row's label, cut where `text` begins; the tip has it whole."""
    longest = max((len(each["text"]) for each in data if "text" in each), default=0)
    limit = alt.ExprRef(f"max(40, width - {longest * LETTER:.0f})")
    label = base.mark_text(style="label", dy=-14, limit=limit)
    value = base.mark_text(style="value", dy=-14)
    return [
        label.encode(x=LEFT, y=y, text="label:N", tooltip=_tip()),
        value.encode(x=RIGHT, y=y, text="text:N", tooltip=_tip()),
    ]


def _ours() -> alt.Color:
    return alt.Color("ours:N").scale(domain=[True, False], range="category").legend(None)


def _shape() -> alt.Shape:
    return alt.Shape("ours:N").scale(domain=[True, False], range=["circle", "diamond"]).legend(None)


def _tip() -> alt.Tooltip:
    return alt.Tooltip("tip:N", title=" ")


def apart(data: Sequence[Datum], least: float, most: float) -> Spec:
    """By step how far a loss lies from another, relative to it, with a line at 0; charts with the same ends have one scale.

    Data: name, x, value, tip.
    """
    base = _over(data)
    x = alt.X("x:Q").axis(alt.Axis(grid=False, tickCount=4)).title("step")
    y = alt.Y("value:Q").axis(alt.Axis(format="~e", tickCount=3)).scale(domain=[least, most], nice=True).title(None)
    zero = (
        alt.Chart({"sequence": {"start": 0, "stop": 1, "as": "zero"}})
        .mark_rule(style="reference")
        .encode(y=_of(y, "zero"))
    )
    line = base.mark_line(strokeWidth=1.5).encode(x=x, y=y)
    return _spec(alt.layer(zero, line, base.mark_point(style="hit").encode(x=x, y=y, tooltip=_tip())), 110)


def curve(data: Sequence[Datum]) -> Spec:
    """A loss by step. Data: name, x, value, tip."""
    base = _over(data)
    x = alt.X("x:Q").axis(alt.Axis(grid=False)).title("step")
    y = alt.Y("value:Q").scale(zero=False).axis(alt.Axis(tickCount=5)).title("loss")
    hit = base.mark_point(style="hit").encode(x=x, y=y, tooltip=_tip())
    return _spec(alt.layer(base.mark_line().encode(x=x, y=y), hit), 200)


def over_runs() -> Spec:
    """A figure over the runs for each `name`, told apart by shape, `low` to `high` as a band; the page gives the data.

    Data: name, ours, x, value, low, high, machine, here, tip. A line joins runs of one machine; marks of others are pale.
    """
    base = _over([])
    x = alt.X("x:O").sort(None).axis(alt.Axis(labelAngle=0, labelOverlap=True, grid=False)).title(None)
    y = alt.Y("value:Q").scale(zero=False, nice=False).axis(alt.Axis(tickCount=3)).title(None)
    colour = alt.Color("name:N").scale(domain=[], range="category").legend(None)
    shape = alt.Shape("name:N").scale(domain=[], range=SHAPES).legend(None)
    width = alt.condition("datum.ours", alt.value(2.5), alt.value(1.25))
    here = alt.condition("datum.here", alt.value(1), alt.value(0.4))
    layers = (
        base.mark_area(style="band").encode(x=x, y=_of(y, "low"), y2="high:Q", color=colour, detail="machine:N"),
        base.mark_line().encode(x=x, y=y, color=colour, detail="machine:N", strokeWidth=width),
        base.mark_point(style="mark").encode(x=x, y=y, color=colour, shape=shape, opacity=here, tooltip=_tip()),
    )
    return _spec(alt.layer(*layers), 120)


def _at(x: alt.X, field: str) -> alt.X:
    """The same axis, of another field."""
    other = x.copy()
    other.shorthand = f"{field}:Q"
    return other


def _of(y: alt.Y, field: str) -> alt.Y:
    """The same axis, of another field."""
    other = y.copy()
    other.shorthand = f"{field}:Q"
    return other


def _legend(direction: Literal["horizontal", "vertical"] = "vertical") -> alt.Legend:
    return alt.Legend(orient="top", direction=direction, title=None, labelLimit=320, symbolSize=90)


def _height(data: Sequence[Datum], row: int) -> int:
    return row * len({each["label"] for each in data})


def _spec(chart: alt.LayerChart | alt.FacetChart, height: int) -> Spec:
    """As the page embeds it: as wide as its place, its colours left to the page."""
    made: Spec = json.loads(chart.properties(width="container", height=height).to_json(validate=True))
    made.pop("config")
    return made
