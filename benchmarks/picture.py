"""Draws the bytes received in layout changes, over the lower bound: `python -m benchmarks.picture RESULT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The colours of Okabe and Ito, and a grey
COLOURS = {"Weft": "#0072B2", "DTensor": "#D55E00", "DTensor, min-cost": "#5F5F5F"}
SHAPES = {"Weft": "circle", "DTensor": "square", "DTensor, min-cost": "triangle-up"}
WIDTH = 620  # pixels
LADDER = [1, 2, 4, 8, 16, 32, 64]


def draw(result: Path) -> str:
    """Draws the layout changes of matrices in `result` as an SVG beside the file.

    Returns a line to print: the path of the picture, or the reason why there is no picture.
    """
    try:
        import vl_convert
    except ImportError as absent:
        return f"no picture: {absent.name} is not installed"
    target = result.with_suffix(".svg")
    rows = [row for row in json.loads(result.read_text()) if len(row["shape"]) == 2]
    target.write_text(vl_convert.vegalite_to_svg(_chart(rows)))
    return f"the picture is {target}"


def _chart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The Vega-Lite spec: a row for each mesh, in it one for each engine."""
    engines = [engine for engine in COLOURS if any(row["engine"] == engine for row in rows)]
    shape = " x ".join(map(str, rows[0]["shape"]))
    pairs = ", ".join(f"{row['pairs']} on {row['mesh']}" for row in rows if row["engine"] == engines[-1])
    points = [
        {**_named(row), "ratio": float(ratio), "share": count / sum(row["ratios"].values())}
        for row in rows
        for ratio, count in row["ratios"].items()
    ]
    means = [
        {**_named(row), "mean": row["mean"], "label": f"mean {row['mean']:.2f}, max {row['max']:.3g}"} for row in rows
    ]
    axis = {"labelLimit": 200, "ticks": False, "domain": False}
    y = {"field": "engine", "type": "nominal", "sort": engines, "title": None, "axis": axis}
    engine = {"field": "engine", "type": "nominal", "legend": None}
    x = {
        "field": "ratio", "type": "quantitative", "axis": {"values": LADDER, "format": "~g"},
        "scale": {"type": "log", "base": 2, "domain": [0.85, 76], "nice": False},
        "title": "bytes received by the busiest rank ÷ lower bound (ratio, log scale; 1 is the fewest possible)",
    }  # fmt: skip
    size = {
        "field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [12, 620]},
        "legend": {
            "title": "share of the pairs", "format": ".0%", "values": [0.01, 0.1, 0.5, 1], "orient": "top",
            "symbolType": "square",
        },
    }  # fmt: skip
    colour, form = (
        {**engine, "scale": {"domain": list(each), "range": list(each.values())}} for each in (COLOURS, SHAPES)
    )
    mean = {"transform": [{"filter": "isValid(datum.mean)"}]}
    layers = [
        {
            "mark": {"type": "point", "filled": True, "opacity": 0.6},
            "encoding": {"x": x, "y": y, "color": colour, "shape": form, "size": size},
        },
        {
            **mean,
            "mark": {"type": "tick", "thickness": 2.5, "height": 26, "color": "#000000"},
            "encoding": {"x": {"field": "mean", "type": "quantitative"}, "y": y},
        },
        {
            **mean,
            "mark": {"type": "text", "align": "left", "fontSize": 12, "color": "#333333"},
            "encoding": {"x": {"value": WIDTH + 10}, "y": y, "text": {"field": "label", "type": "nominal"}},
        },
    ]
    return {
        "data": {"values": points + means},
        "facet": {
            "row": {
                "field": "mesh", "type": "nominal", "title": None,
                "sort": list(dict.fromkeys(row["mesh"] for row in rows)),
                "header": {"labelAngle": 0, "labelAlign": "left", "labelFontWeight": "bold"},
            }
        },
        "spec": {"layer": layers, "width": WIDTH, "height": 30 * len(engines)},
        "title": {
            "text": "Bytes received in a layout change, over the fewest possible", "anchor": "start", "offset": 14,
            "subtitle": [
                f"All ordered pairs of the layouts {{R, S0, S1}} of a {shape} fp32 tensor, those that need bytes.",
                "A mark is a ratio, its area the share of pairs that have it; the black bar is the mean.",
                f"{engines[-1]} (slow to plan): the first pairs of a fixed shuffle, {pairs}.",
            ],
        },
        "background": "white",
        "config": {
            "font": "Helvetica, Arial, sans-serif", "padding": 16, "view": {"stroke": "#DDDDDD"},
            "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridColor": "#E6E6E6"},
            "header": {"labelFontSize": 13},
            "title": {"fontSize": 16, "subtitleFontSize": 12, "subtitleColor": "#444444", "subtitlePadding": 6},
        },
    }  # fmt: skip


def _named(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("engine", "mesh")}


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
