"""A run's metrics outside of the terminal: metrics.jsonl read back, plots, and trackers.

metrics.jsonl is read to resume the run, to check the file against a checkpoint, to compare two runs, and to plot. Plots
show loss and speed, on the terminal or as a picture file, and on the terminal the load of experts. `Results`
(results.py) calls the functions here. It appends the lines of metrics.jsonl with `append` of safe_files.py, which
refuses a link. `Trackers` sends metrics also to TensorBoard or Weights & Biases (`--track`), for `Results`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from ..checks import LARGEST
from ..safe_files import parse_json, read_plain, write_anew
from ..terminal import install_command
from .config import TrackerName, TrainConfig
from .report import Metrics

HEIGHT = 10  # lines of a plot on a terminal, without the axis
TENTHS_BELOW = 50  # steps; ticks of shorter plots have tenths, because a tick is at every tenth column
AXIS = 24  # columns left of the plot, for axis and labels
NARROW = 50  # fewest columns of each of two plots side by side
NARROWEST = AXIS + 10  # fewest columns of a single plot

_MARKS = " ▁▂▃▄▅▆▇█"  # of the load of experts: from no token to twice the mean or more
_MOST = 2.0  # the load, over the mean, of the highest mark

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Logged:
    """A step's line of metrics.jsonl: the text, with the newline, and the parsed values."""

    text: str
    step: int
    loss: float
    tokens_per_second: float
    held_out_loss: float | None


def read_logged(path: Path, until: int | None = None) -> list[Logged]:
    """Read the lines of metrics.jsonl up to step `until`, or all if None.

    Empty for a missing file, and for a file whose first step comes later. Lines after step `until` are not checked: a
    killed run may leave anything there. A last line without a newline is ignored.
    Raises ValueError, with the file and the line number, for malformed lines and missing steps.
    """
    logged: list[Logged] = []
    if until == 0 or not path.exists():
        return logged
    lines = _content(path).split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        each = _parse_line(line)
        if each is None or (logged and each.step != logged[-1].step + 1):
            wrong = (
                "is not as it was written" if each is None else f"is of step {each.step}, but follows {logged[-1].step}"
            )
            raise ValueError(f"{path}, line {number} {wrong}; {_REMEDY}")
        if until is not None and each.step > until:
            break
        logged.append(each)
        if each.step == until:
            break
    if until is not None and logged and logged[-1].step < until:
        raise ValueError(
            f"{path} ends with line {len(lines)}, of step {logged[-1].step}, before step {until}; {_REMEDY}"
        )
    return logged


_REMEDY = "copy the file again, or resume into a new folder with --resume PATH --output FOLDER"


def last_line(path: Path) -> dict[str, Any] | None:
    """The last complete line of a metrics.jsonl as a dict; None for a missing file or a malformed line.

    Read by `find_checkpoint` for "step" and "done", the finished share of the run's steps, which must be a number.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(-min(_LONGEST_LINES, path.stat().st_size), os.SEEK_END)
        lines = file.read().split(b"\n")[:-1]
    if not lines or _parse_line(lines[-1]) is None:
        return None
    value: dict[str, Any] = json.loads(lines[-1])
    return value if type(value.get("done")) in (int, float) else None


_LARGEST = 2**34  # bytes of a file; enough for the lines of 17 million steps
_LONGEST_LINES = 16384  # bytes read from the end of the file; a line has about a thousand


class RunningChecksum:
    """Running length and SHA-256 of metrics.jsonl, kept by `Results`.

    Every checkpoint stores the current values; on resuming, `check_logged` compares the file with the stored values.
    """

    def __init__(self) -> None:
        self._lines = self._nbytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, text: str) -> None:
        """Add one more line, with its newline."""
        self._lines += 1
        self._nbytes += len(text.encode())
        self._sha256.update(text.encode())

    def as_json(self) -> dict[str, Any]:
        return {"lines": self._lines, "bytes": self._nbytes, "sha256": self._sha256.hexdigest()}


def check_logged(path: Path, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the file begins with the lines described by `saved`, from `RunningChecksum.as_json`."""
    content = _content(path)[: saved["bytes"]] if path.exists() else b""
    if len(content) < saved["bytes"]:
        raise ValueError(
            f"{path} has {len(content)} bytes, but its {saved['lines']} lines had {saved['bytes']} when the checkpoint "
            f"was saved; {_REMEDY}"
        )
    if hashlib.sha256(content).hexdigest() != saved["sha256"]:
        raise ValueError(f"{path} was changed in its first {saved['lines']} lines after they were written; {_REMEDY}")


def _content(path: Path) -> bytes:
    """The bytes of the file. Raises ValueError for an unreadable file."""
    try:
        return read_plain(path, limit=_LARGEST)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None


def _parse_line(line: bytes) -> Logged | None:
    """The line as a `Logged`; None for a malformed line."""
    try:
        value = parse_json(line, METRICS, _REMEDY)
        step, held_out = value["step"], value["held_out_loss"]
        each = Logged(f"{line.decode()}\n", step, value["loss"], value["tokens_per_second"], held_out)
    except (ValueError, KeyError):
        return None
    numbers = [each.loss, each.tokens_per_second, *([] if held_out is None else [held_out])]
    is_whole = type(step) is int and 0 < step <= LARGEST and all(map(_is_number, numbers))
    return each if is_whole else None


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number within the range of floats."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


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


def draw_curves(curves: Curves, width: int) -> str:
    """Text plots of loss and speed for a terminal of `width` columns: side by side if wide enough. No colors."""
    side_by_side = width >= 2 * NARROW
    panels = [
        _panel(title, curves.steps, values, width // 2 - 1 if side_by_side else width)
        for title, values in (("loss", curves.losses), ("tokens/s", curves.speeds))
    ]
    if not side_by_side:
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
    figure.x_ticks_fkt = lambda tick, _: f"{tick:,.0f}" if steps[-1] >= TENTHS_BELOW else f"{round(tick, 1):g}"
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


def draw_load(load: Sequence[Sequence[float]], layers: Sequence[int], width: int) -> str:
    """A heading, then a line for each layer: a mark for the load of each expert, over the layer's mean load.

    load: a row for each layer, with the number of tokens of each expert. layers: the layers' numbers. width: columns;
    in a layer with more experts than columns, neighbors share a mark, which shows the busiest expert.
    """
    label = max(len(f"layer {layer}") for layer in layers)
    columns = max(1, width - label - len("  busiest 10.00x"))
    each = math.ceil(len(load[0]) / columns)  # experts of a mark
    shared = f", {each} to a mark" if each > 1 else ""
    lines = [f"load of experts in the last steps (full height: {_MOST:g} times the mean or more{shared})"]
    for layer, row in zip(layers, load, strict=True):
        mean = sum(row) / len(row) or 1.0
        marks = "".join(_mark(max(row[i : i + each]) / mean) for i in range(0, len(row), each))
        lines.append(f"{f'layer {layer}':{label}} {marks}  busiest {max(row) / mean:.2f}x")
    return "\n".join(lines)


def _mark(share: float) -> str:
    """The mark of a load; a blank only for an expert without tokens. share: the load over the mean load."""
    steps = len(_MARKS) - 1
    return _MARKS[0 if share <= 0 else min(steps, max(1, round(share / _MOST * steps)))]


@dataclass(frozen=True, slots=True)
class ComparedMetrics:
    """The comparison of two runs' losses and norms, over the steps of both."""

    steps: int  # of both runs
    same: int  # steps with the same loss and norm
    first: int | None = None  # the first different step; None without a difference
    loss: tuple[float, float] | None = None  # of the first different step, in the two runs
    norm: tuple[float, float] | None = None  # of the gradients in this step; None if a run has no norm

    def as_text(self) -> str:
        """The comparison as a line of text."""
        if self.first is None or self.loss is None:
            return (
                f"metrics: the same loss and norm in all {self.steps} steps"
                if self.steps
                else "metrics: no common step"
            )
        parts = [f"loss {self.loss[0]:.9g} and {self.loss[1]:.9g}"]
        if self.norm is not None:
            parts.append(f"norm {self.norm[0]:.9g} and {self.norm[1]:.9g}")
        same = f"metrics: the same in {self.same} of {self.steps} steps"
        return f"{same}; first apart at step {self.first}: {', '.join(parts)}"


def compare_metrics(folders: Sequence[Path]) -> ComparedMetrics:
    """Compare the metrics.jsonl of two runs. folders: of the runs. Raises ValueError as `read_logged`."""
    rows = []
    for folder in folders:
        values = [json.loads(each.text) for each in read_logged(folder / METRICS)]
        rows.append({each["step"]: (each["loss"], each.get("grad_norm")) for each in values})
    common = sorted(rows[0].keys() & rows[1].keys())
    apart = [step for step in common if rows[0][step] != rows[1][step]]
    if not apart:
        return ComparedMetrics(len(common), len(common))
    (loss, norm), (other_loss, other_norm) = rows[0][apart[0]], rows[1][apart[0]]
    norms = None if norm is None or other_norm is None else (norm, other_norm)
    return ComparedMetrics(len(common), len(common) - len(apart), apart[0], (loss, other_loss), norms)


WANDB_ID = "wandb-id"  # file in the run's folder: the id under which a resumed run continues at wandb
Send = Callable[[int, dict[str, float]], None]  # sends the numbers of a step


def check_trackers(names: tuple[TrackerName, ...]) -> None:
    """Raise ValueError for a tracker whose package is not installed. names: the values of --track."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"track is {name}, which is not installed; {install_command(name)}")


class Trackers:
    """Sends the metrics of each step to the named trackers. Made by `Results` on the writing rank."""

    def __init__(self, names: tuple[TrackerName, ...], folder: Path, config: TrainConfig) -> None:
        self._sends = [_MAKERS[name](folder, config) for name in names]

    def add(self, metrics: Metrics) -> None:
        """Send the metrics of a step."""
        numbers = {
            name: float(value)
            for name, value in dataclasses.asdict(metrics).items()
            if name != "step" and value is not None
        }
        for send in self._sends:
            send(metrics.step, numbers)


def _tensorboard(folder: Path, config: TrainConfig) -> Send:
    """A Send for files in FOLDER/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = None

    def send(step: int, numbers: dict[str, float]) -> None:
        nonlocal writer
        # purge_step hides the values of this and later steps sent before the run was interrupted and resumed.
        writer = writer or SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # written now, to survive a kill

    return send


def _wandb(folder: Path, config: TrainConfig) -> Send:
    """A Send for Weights & Biases, to a single run over all resumptions."""
    import wandb

    file = folder / WANDB_ID
    name = file.read_text() if file.exists() else ""
    if not name:
        name = uuid.uuid4().hex
        write_anew(file, name.encode())
    run: Any = wandb.init(
        project="weft",
        name=folder.name,
        dir=str(folder),
        config=dataclasses.asdict(config),
        id=name,
        resume="allow",
    )
    return lambda step, numbers: run.log(numbers, step=step)


_MAKERS: dict[TrackerName, Callable[[Path, TrainConfig], Send]] = {"tensorboard": _tensorboard, "wandb": _wandb}
