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
        import altair
        import vl_convert  # noqa: F401  # altair needs vl_convert to write SVG
    except ImportError as absent:
        return f"no picture: {absent.name} is not installed"
    target = result.with_suffix(".svg")
    rows = [row for row in json.loads(result.read_text()) if len(row["shape"]) == 2]
    _chart(altair, rows).save(target)
    return f"the picture is {target}"


def _chart(alt: Any, rows: list[dict[str, Any]]) -> Any:
    meshes = list(dict.fromkeys(row["mesh"] for row in rows))
    engines = [engine for engine in COLOURS if any(row["engine"] == engine for row in rows)]
    shape = " x ".join(map(str, rows[0]["shape"]))
    points = [
        {
            "engine": row["engine"],
            "mesh": row["mesh"],
            "ratio": float(ratio),
            "share": count / sum(row["ratios"].values()),
        }
        for row in rows
        for ratio, count in row["ratios"].items()
    ]
    means = [
        {key: row[key] for key in ("engine", "mesh", "mean")}
        | {"label": f"mean {row['mean']:.2f}, max {row['max']:.3g}"}
        for row in rows
    ]
    x = alt.X("ratio:Q").scale(type="log", base=2, domain=[0.85, 76], nice=False).axis(values=LADDER, format="~g")
    x = x.title("bytes received by the busiest rank ÷ lower bound (ratio, log scale; 1 is the fewest possible)")
    y = alt.Y("engine:N").sort(engines).title(None).axis(labelLimit=200, ticks=False, domain=False)
    colour = alt.Color("engine:N").scale(domain=list(COLOURS), range=list(COLOURS.values())).legend(None)
    form = alt.Shape("engine:N").scale(domain=list(SHAPES), range=list(SHAPES.values())).legend(None)
    size = alt.Size("share:Q").scale(domain=[0, 1], range=[12, 620])
    size = size.legend(
        title="share of the pairs", format=".0%", values=[0.01, 0.1, 0.5, 1], orient="top", symbolType="square"
    )
    spread = alt.Chart().mark_point(filled=True, opacity=0.6).encode(x=x, y=y, color=colour, shape=form, size=size)
    mean = alt.Chart().transform_filter("isValid(datum.mean)")
    tick = mean.mark_tick(thickness=2.5, height=26, color="#000000").encode(x=alt.X("mean:Q"), y=y)
    label = mean.mark_text(align="left", fontSize=12, color="#333333").encode(
        x=alt.value(WIDTH + 10), y=y, text="label:N"
    )
    pairs = ", ".join(f"{row['pairs']} on {row['mesh']}" for row in rows if row["engine"] == engines[-1])
    return (
        alt.layer(spread, tick, label, data=alt.Data(values=points + means))
        .properties(width=WIDTH, height=30 * len(engines))
        .facet(
            row=alt.Row("mesh:N")
            .sort(meshes)
            .title(None)
            .header(labelAngle=0, labelAlign="left", labelFontWeight="bold")
        )
        .properties(
            title=alt.Title(
                "Bytes received in a layout change, over the fewest possible",
                subtitle=[
                    f"All ordered pairs of the layouts {{R, S0, S1}} of a {shape} fp32 tensor, those that need bytes.",
                    "A mark is a ratio, its area the share of pairs that have it; the black bar is the mean.",
                    f"{engines[-1]} (slow to plan): the first pairs of a fixed shuffle, {pairs}.",
                ],
                anchor="start",
                offset=14,
            ),
            background="white",
        )
        .configure(font="Helvetica, Arial, sans-serif", padding=16)
        .configure_view(stroke="#DDDDDD")
        .configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gridColor="#E6E6E6")
        .configure_header(labelFontSize=13)
        .configure_title(fontSize=16, subtitleFontSize=12, subtitleColor="#444444", subtitlePadding=6)
    )


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
