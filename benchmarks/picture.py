"""Pictures of results, by Altair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {"weft": "#0072B2", "dtensor": "#D55E00"}  # Okabe and Ito: told apart with any colour vision
SHAPES = {"weft": "circle", "dtensor": "square"}


def draw_ratios(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Writes the distribution of each engine's ratios on each mesh; returns a line that says where, or why not."""
    try:
        import altair
    except ImportError:
        return "no picture: altair and vl-convert-python are not installed"
    points = [
        {"mesh": row["mesh"], "engine": row["engine"], "ratio": float(ratio), "pairs": count, "mean": row["mean"]}
        for row in rows
        for ratio, count in row["ratios"].items()
    ]
    order = list(COLOURS)
    base = altair.Chart(altair.Data(values=points))
    colour = altair.Color(
        "engine:N", title="engine", sort=order, scale=altair.Scale(domain=order, range=[*COLOURS.values()])
    )
    shape = altair.Shape("engine:N", title="engine", scale=altair.Scale(domain=order, range=[*SHAPES.values()]))
    x = altair.X("ratio:Q", title="bytes received / lower bound", scale=altair.Scale(type="log", domain=[0.9, 80]))
    y = altair.Y("engine:N", title=None, sort=order)
    dots = base.mark_point(filled=True, opacity=0.55).encode(
        x=x, y=y, color=colour, shape=shape, size=altair.Size("pairs:Q", title="pairs of layouts")
    )
    means = base.mark_tick(thickness=3, size=26, color="black").encode(x=altair.X("mean:Q"), y=y)
    labels = base.mark_text(dy=-20, fontSize=11, color="black").encode(
        x=altair.X("mean:Q"), y=y, text=altair.Text("label:N")
    ).transform_aggregate(mean="mean(mean)", groupby=["mesh", "engine"]).transform_calculate(
        label="'mean ' + format(datum.mean, '.2f')"
    )
    chart = (
        altair.layer(dots, means, labels)
        .properties(width=560, height=90)
        .facet(row=altair.Row("mesh:N", title="mesh", sort=[row["mesh"] for row in rows]))
        .properties(title="Layout changes: bytes received over the lower bound", background="white")
    )
    chart.save(str(path))
    return f"picture: {path}"
