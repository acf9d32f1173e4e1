"""The terminal output of a training run, printed by `Report` on rank 0, in the order of the run."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from weft.mesh import Layout, Shard

from ..schedules.schedule import Schedule
from ..step.communication import PHASES, Communication
from ..terminal import printable
from .config import TrainConfig
from .recipes import size_in_words
from .run import Run
from .suggestions import suggestions

NAMED = 3  # skipped files whose names are printed
# Largest relative difference of the mean loss between two meshes. float32 keeps 24 bits of every partial sum and
# bfloat16 8, and the rounding errors of the tokens average out.
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-3}
BESIDE_BAR = 139  # columns of the text beside the progress bar; a narrower terminal gets no bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics of a step: a line of metrics.jsonl, also shown on the terminal and sent to trackers."""

    step: int  # from 1
    done: float  # finished share of the run's steps
    loss: float
    grad_norm: float  # before clipping
    lr: float
    tokens_per_second: float  # of all processes together
    tflops: float  # 10^12 floating-point operations per second, per process
    mfu: float | None  # model FLOPs utilization: tflops over the chip's peak; None if the peak is unknown
    memory_bytes: int  # peak of this process until now
    memory_share: float  # memory_bytes over the memory of the device
    communication_share: float  # share of the step's time in which the device stood still for communication
    data_share: float  # share of the step's time spent waiting for the batch to be read
    seconds_left: float  # until the last step is done
    held_out_loss: float | None = None  # None in steps without an evaluation
    perplexity: float | None = field(
        init=False, default=None
    )  # e**held_out_loss, at most e**700, near the largest float

    def __post_init__(self) -> None:
        if self.held_out_loss is not None:
            object.__setattr__(self, "perplexity", math.exp(min(self.held_out_loss, 700)))

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds_left), 60)
        left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
        flops = f"{self.tflops:.3g} TFLOP/s" if self.tflops >= 1 else f"{self.tflops * 1000:.3g} GFLOP/s"
        shown = [
            f"loss {self.loss:.4f}",
            f"grad norm {self.grad_norm:.3f}",
            f"lr {self.lr:.1e}",
            f"{self.tokens_per_second:,.0f} tokens/s",
            flops + ("" if self.mfu is None else f" ({self.mfu:.0%} of the peak)"),
            f"memory {self.memory_bytes / 2**30:.2f} GiB ({self.memory_share:.0%})",
            f"waiting {self.communication_share:.0%}",
            f"{left} left",
        ]
        if self.held_out_loss is not None:
            shown.insert(1, f"held out {self.held_out_loss:.4f} (perplexity {self.perplexity:.4g})")
        return "  ".join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A parameter with its layout on some ranks: made by `find_parts` and `explain`, printed by `Report.layout`."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None  # None if unsharded, on a single process
    stage_rank: int | None = None  # coordinate of these ranks on "pp"; None without a pipeline


class Report:
    """Prints the progress of a run. enabled: whether to print at all; true on rank 0 only."""

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def lines(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.line(text)

    @property
    def width(self) -> int:
        """Columns of the terminal, at most 120."""
        return min(self._console.width, 120)

    def layout(self, parts: Sequence[Part], whose: str = "") -> None:
        """Print a line per kind of parameter: shape, layout, shard shapes, and the ranks along "pp" that hold it.

        parts: in the model's order: of all stages, or of a single stage that `whose` names in the heading.
        """
        kinds: dict[tuple[str, ...], list[Part]] = {}
        for part in parts:
            layout = "whole, on one process" if part.layout is None else str(part.layout)
            shards = "" if part.layout is None else _shards(part.layout, part.shape)
            kinds.setdefault((general_name(part.name), str(list(part.shape)), layout, shards), []).append(part)
        self.line(f"layout of the parameters{whose}")
        rows = []
        for (name, shape, layout, shards), alike in kinds.items():
            count = len({part.name for part in alike})
            at = sorted({part.stage_rank for part in alike if part.stage_rank is not None})
            on = f"on pp={', '.join(map(str, at))}" if at else ""
            rows.append((name, f"{shape} x {count}" if count > 1 else shape, layout, shards, on))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            self.line("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=True)).rstrip())

    def schedule(self, schedule: Schedule) -> None:
        """Print the pipeline schedule."""
        self.line(f"schedule of the pipeline\n{schedule}")

    def predicted(self, predicted: Communication, rank: int = 0) -> None:
        """Print the predicted collectives of a step, with the bytes received by `rank`."""
        self.line(f"collectives a step, predicted by running the model on shapes; bytes that rank {rank} receives")
        for line in str(predicted).splitlines():
            self.line(f"  {line}")

    def issued(self, predicted: Communication, issued: Communication) -> None:
        """Print the collectives issued by step 1, and whether each phase is as predicted."""
        self.line("collectives of step 1, as issued")
        wide = max(len(issued.select(phase=phase).summary) for phase in PHASES)
        for phase in PHASES:
            seen, expected = issued.select(phase=phase), predicted.select(phase=phase)
            same = (
                "as predicted"
                if (seen.counts, seen.nbytes) == (expected.counts, expected.nbytes)
                else "NOT as predicted"
            )
            self.line(f"  {phase:10} {seen.summary:{wide}}  {seen.nbytes:>13,} bytes  {same}")

    def check(self, loss: float, alone: float, processes: int, dtype: str) -> bool:
        """Print the loss of step 1 beside `alone`, the loss on one process; return whether both agree within
        rounding.

        The difference is relative to the loss, or absolute for a loss below 1, because the rounded values are the
        logits.
        """
        difference = abs(loss - alone) / max(abs(alone), 1.0)
        is_within = difference <= ROUNDING[dtype]
        self.line(
            f"check  loss of step 1: {loss:.7f} on {processes} process{'es' if processes > 1 else ''}, {alone:.7f} "
            f"on one: {'within' if is_within else 'NOT within'} {ROUNDING[dtype]:.0e}, as {dtype} rounds; relative "
            f"difference {difference:.1e}"
        )
        return is_within

    def saved(self, count: int, *, blocked: float, writing: float) -> None:
        """Print the cost of the checkpoints.

        blocked: seconds of training spent waiting for checkpoints. writing: seconds of writing.
        """
        self.line(
            f"checkpoints  {count} written in {writing:.2f} s, while the run went on; it waited {blocked:.3f} s for "
            f"them, {blocked / writing:.1%} of that"
        )

    @contextlib.contextmanager
    def steps(self, config: TrainConfig) -> Iterator[_Steps]:
        """Context in which metrics are shown: as a progress bar on a terminal, as lines otherwise."""
        # With FORCE_COLOR, rich takes a pipe for a terminal. Colors are welcome there, a moving cursor is not.
        if self._console.quiet or not (self._console.is_interactive and self._console.file.isatty()):
            yield _Steps(self, config, None)
            return
        room = min(self._console.width - BESIDE_BAR, 40)
        columns: list[ProgressColumn] = [TextColumn("step {task.completed}/{task.total} {task.percentage:3.0f}%")]
        columns += [BarColumn(bar_width=room)] if room > 0 else []
        # wraps on a narrow terminal
        columns += [TextColumn("{task.description}", table_column=Column())]
        with Progress(*columns, console=self._console) as bar:
            yield _Steps(self, config, bar)


class _Steps:
    """Shows the metrics of steps, on the progress bar or as lines. Made by `Report.steps`."""

    def __init__(self, report: Report, config: TrainConfig, bar: Progress | None) -> None:
        self._report, self._config, self._bar = report, config, bar
        self._task = bar.add_task("", total=config.steps) if bar else None

    def begun(self, step: int) -> None:
        """Advance the bar: the step is queued on the device, and may still be running."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def show(self, metrics: Metrics) -> None:
        """Show a step's metrics."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=metrics.step, description=str(metrics))
        elif (
            metrics.step in (1, self._config.steps)
            or metrics.step % self._config.log_every == 0
            or metrics.held_out_loss is not None
        ):
            width = len(str(self._config.steps))
            self._report.line(f"step {metrics.step:{width}}/{self._config.steps} {metrics.done:4.0%}  {metrics}")


def _shards(layout: Layout, shape: tuple[int, ...]) -> str:
    """The distinct shard shapes over the ranks, as text; empty if every shard has the full shape.

    Only a single rank per distinct shard is asked, because there may be thousands of ranks.
    """
    repeats = [
        axis
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if not isinstance(placement, Shard)
    ]
    is_sharded = len(repeats) < layout.mesh.ndim
    ranks = layout.mesh.select(**dict.fromkeys(repeats, 0)).ranks if is_sharded else layout.mesh.ranks[:1]
    shapes = list(dict.fromkeys(layout.local_shape(shape, rank) for rank in ranks))
    return "" if shapes == [shape] else "shards " + ", ".join(str(list(shard)) for shard in shapes[:4])


def mesh_in_words(axes: Mapping[str, int]) -> str:
    """The mesh as text: "4 processes, mesh dp=2 x tp=2"."""
    count = math.prod(axes.values())
    return (
        f"{count:,} process{'es' if count > 1 else ''}, "
        f"mesh {' x '.join(f'{axis}={size}' for axis, size in axes.items())}"
    )


def describe(run: Run, *, gpus: int) -> str:
    """The first lines of a run's output: the model, data and mesh, then the files left out of the data."""
    device, backend = ("cuda", "nccl") if gpus else ("cpu", "gloo")
    line = (
        f"{run.title}: {size_in_words(run.config.model, run.config.model_class)}, on {run.corpus.name}; {device}, "
        f"{backend}, {mesh_in_words(run.axes)}"
    )
    left_out = (
        (run.corpus.skipped, "skipped", "file", "files", ", not UTF-8 text"),
        (run.corpus.passed, "passed over", "entry", "entries", ""),
    )
    for found, verb, singular, plural, why in left_out:
        if found:
            names = printable(", ".join(map(str, found[:NAMED]))) + (", ..." if len(found) > NAMED else "")
            line += f"\n{verb} {len(found)} {singular if len(found) == 1 else plural}{why}: {names}"
    return line


def _last(run: Run) -> str:
    """The final model of the run, in words for the closing lines."""
    if run.config.model_class is None:
        return "checkpoint/ for transformers"
    return f"checkpoint-{run.config.steps}/ to resume from; a model from outside has no form for transformers"


def next_steps(run: Run, losses: tuple[float, float], seconds: float, *, a_token: float, on_cpu: bool) -> str:
    """The closing lines of a run: losses on held-out text, the saved files, and commands to try next.

    losses: on the held-out text, before the first step and after the last.
    a_token: bytes of held-out text per token, to print losses in bits per byte, comparable between tokenizers.
    """
    first, last = losses
    bits = " -> ".join(f"{loss / math.log(2) / a_token:.2f}" for loss in losses) + " bits a byte"
    commands = "\n      ".join(suggestions(run, on_cpu=on_cpu))
    return (
        f"loss on held-out text {first:.4f} -> {last:.4f}, {bits}, in {seconds:.0f} s\n"
        f"saved {run.folder}: config.toml, metrics.jsonl, curves.svg, plan.txt, versions.json, and {_last(run)}"
        + (f"\nnext  {commands}" if commands else "")
    )


def general_name(parameter: str) -> str:
    """A parameter's name with a star for the layer's number: "layers.*.mlp.up_proj.weight"."""
    return re.sub(r"\.\d+\.", ".*.", parameter)
