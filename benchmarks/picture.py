"""Pictures of results, by Altair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {"weft": "#0072B2", "dtensor": "#D55E00"}  # Okabe and Ito: told apart with any colour vision
TITLE = "Every layout change between {R, S0, S1} of a matrix: Weft's plans and DTensor.redistribute"
SHAPES = {"weft": "circle", "dtensor": "square"}


def draw_ratios(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Writes the distribution of each engine's ratios on each mesh; returns a line that says where, or why not."""
    try:
        import altair
    except ImportError:
        return "no picture: altair and vl-convert-python are not installed"
    points = [
        {**{key: row[key] for key in ("mesh", "engine", "mean")}, "ratio": float(ratio), "share": share}
        for row in rows
        for ratio, share in row["ratios"].items()
    ]
    order = list(COLOURS)
    scale = altair.Scale(type="log", domain=[0.9, 80], nice=False)
    axis = altair.Axis(values=[1, 2, 4, 8, 16, 32, 64])
    title = "bytes received by the busiest rank / lower bound (log scale; 1 is as few as any plan can)"
    y = altair.Y("engine:N", title=None, sort=order)
    base = altair.Chart(altair.Data(values=points))
    dots = base.mark_point(filled=True, opacity=0.6).encode(
        x=altair.X("ratio:Q", title=title, scale=scale, axis=axis),
        y=y,
        color=altair.Color("engine:N", sort=order, scale=altair.Scale(domain=order, range=[*COLOURS.values()])),
        shape=altair.Shape("engine:N", sort=order, scale=altair.Scale(domain=order, range=[*SHAPES.values()])),
        size=altair.Size(
            "share:Q", title="share of pairs", scale=altair.Scale(range=[12, 400]), legend=altair.Legend(format="%")
        ),
    )
    mean = altair.X("mean:Q", scale=scale, axis=axis, title=title)
    one = base.transform_aggregate(mean="mean(mean)", groupby=["mesh", "engine"])
    ticks = one.mark_tick(thickness=2, size=30, color="black").encode(x=mean, y=y)
    labels = (
        one.transform_calculate(label="'mean ' + format(datum.mean, '.2f')")
        .mark_text(dy=-22, align="left", dx=-2, fontSize=11, color="black")
        .encode(x=mean, y=y, text=altair.Text("label:N"))
    )
    chart = (
        altair.layer(dots, ticks, labels)
        .properties(width=600, height=110)
        .facet(row=altair.Row("mesh:N", title="mesh", sort=[row["mesh"] for row in rows]))
        .properties(title=TITLE, background="white")
    )
    chart.save(str(path))
    return f"picture: {path}"
