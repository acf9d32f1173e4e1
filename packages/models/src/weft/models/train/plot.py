"""Plots of a run's loss and speed from metrics.jsonl: on the terminal, and as a picture file."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from .files import write_anew
from .logged import read_logged

HEIGHT = 10  # lines of a plot on a terminal, without the axis
AXIS = 24  # columns left of the plot, for axis and labels
NARROW = 50  # columns of a plot if two stand side by side
NARROWEST = AXIS + 10  # fewest columns of a plot


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of a run: one number per logged step."""

    steps: list[int]
    losses: list[float]
    speeds: list[float]  # tokens per second
    held_out: list[tuple[int, float]]  # (step, held-out loss), for the steps with an evaluation


def read_curves(metrics: Path) -> Curves:
    """Read the curves of a metrics.jsonl. Raises ValueError as `read_logged`."""
    lines = read_logged(metrics)
    return Curves(
        [line.step for line in lines],
        [line.loss for line in lines],
        [line.tokens_per_second for line in lines],
        [(line.step, line.held_out_loss) for line in lines if line.held_out_loss is not None],
    )


def drawn(curves: Curves, width: int) -> str:
    """Text plots of loss and speed for a terminal of `width` columns: side by side if wide enough. No colors."""
    beside = width >= 2 * NARROW
    panels = [
        _panel(title, curves.steps, values, width // 2 - 1 if beside else width)
        for title, values in (("loss", curves.losses), ("tokens/s", curves.speeds))
    ]
    if not beside:
        return "\n".join(panels)
    left, right = (panel.splitlines() for panel in panels)
    wide = max(map(len, left))
    return "\n".join(f"{a:{wide}}  {b}".rstrip() for a, b in zip(left, right, strict=True))


def _panel(title: str, steps: list[int], values: list[float], width: int) -> str:
    """A text plot of `values` over `steps`, `width` columns wide."""
    from plotille import Figure

    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * 0.05  # a flat curve needs some height too
    figure = Figure()
    figure.width, figure.height, figure.with_colors = width - AXIS, HEIGHT, False
    figure.x_label, figure.y_label = "step", title
    figure.x_ticks_fkt = lambda tick, _: f"{tick:,.0f}"
    figure.y_ticks_fkt = lambda tick, _: f"{tick:,.4g}" if abs(tick) < 1e4 else f"{tick:,.0f}"
    figure.set_x_limits(0, steps[-1])
    figure.set_y_limits(low - margin, high + margin)
    figure.plot(steps, values)
    picture: str = figure.show()
    return picture


def save_picture(curves: Curves, path: Path) -> None:
    """Save plots of loss and speed as SVG or PNG, by the suffix of `path`. Raises OSError as `write_anew`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    loss, speed = figure.subplots(1, 2)
    loss.plot(curves.steps, curves.losses, label="training")
    if curves.held_out:
        loss.plot(*zip(*curves.held_out, strict=True), "o-", label="held out")
        loss.legend(frameon=False)
    loss.set_ylabel("loss")
    speed.plot(curves.steps, curves.speeds, color="tab:green")
    speed.set_ylabel("tokens/s")
    speed.set_ylim(bottom=0)
    for panel in (loss, speed):
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    write_anew(path, picture.getvalue())
