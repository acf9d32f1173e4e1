"""What a training run says on the terminal, in order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from weft.mesh import Layout, Shard

from ..communication import PHASES, Communication
from ..schedules.schedule import Schedule
from ..terminal import printable
from .config import Run, TrainConfig, general_name
from .recipes import size_in_words
from .suggestions import suggestions

NAMED = 3  # files that are named of those that were left out
# By how much the mean loss of two meshes may differ, relative: float32 keeps 24 bits of each of their sums, bfloat16 keeps 8,
# and the errors of the tokens average out.
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-3}
BESIDE_BAR = 139  # columns of what stands beside the bar: without as many and more there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One step: what metrics.jsonl holds and the terminal shows.

    done: the share of the run that is behind. tokens_per_second: of all processes. tflops: 10^12 operations a second, of a
    process. mfu: their share of the chip's peak; None where that is not known. memory_bytes: at the most so far, of this
    process, and memory_share of what its device has. communication_share: of the step's time, in which its work stood still
    for communication; data_share: in which the batch was still being read. seconds_left: to the last step. held_out_loss: None
    in steps that do not take it. perplexity: e to that, at most e to 700, which is near the largest number that there is.
    """

    step: int
    done: float
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    memory_bytes: int
    memory_share: float
    communication_share: float
    data_share: float
    seconds_left: float
    held_out_loss: float | None = None
    perplexity: float | None = field(init=False, default=None)

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
    """A parameter, as some ranks hold it.

    layout: None of one that is whole, on one process. stage_rank: their coordinate on "pp"; None without stages.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None
    stage_rank: int | None = None


class Report:
    """Prints on one rank; silent on the others."""

    def __init__(self, *, speaks: bool) -> None:
        self._console = Console(quiet=not speaks, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def lines(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.line(text)

    @property
    def width(self) -> int:
        """Columns of the terminal, and not too many of a wide one."""
        return min(self._console.width, 120)

    def layout(self, parts: Sequence[Part], whose: str = "") -> None:
        """A line for each kind of parameter: its shape, its layout, the shapes of its shards, and the stages' ranks that hold it.

        parts: in the model's order, of every stage or of the one that `whose` names.
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
        self.line(f"schedule of the pipeline\n{schedule}")

    def predicted(self, predicted: Communication, rank: int = 0) -> None:
        self.line(f"collectives a step, predicted by running the model on shapes; bytes that rank {rank} receives")
        for line in str(predicted).splitlines():
            self.line(f"  {line}")

    def issued(self, predicted: Communication, issued: Communication) -> None:
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
        """Compares the loss of step 1 with that of one process, `alone`; whether they differ by no more than rounding.

        The difference is relative to the loss, or to 1 where the loss is lower: what is rounded are the logits.
        """
        difference = abs(loss - alone) / max(abs(alone), 1.0)
        is_within = difference <= ROUNDING[dtype]
        self.line(
            f"check  loss of step 1: {loss:.7f} on {processes} process{'es' if processes > 1 else ''}, {alone:.7f} on "
            f"one: {'within' if is_within else 'NOT within'} {ROUNDING[dtype]:.0e}, as {dtype} rounds; relative difference "
            f"{difference:.1e}"
        )
        return is_within

    def saved(self, count: int, *, blocked: float, writing: float) -> None:
        """What checkpoints have cost. blocked, writing: seconds that training waited, and in which they were written."""
        self.line(
            f"checkpoints  {count} written in {writing:.2f} s, while the run went on; it waited {blocked:.3f} s for them, "
            f"{blocked / writing:.1%} of that"
        )

    @contextlib.contextmanager
    def steps(self, config: TrainConfig) -> Iterator[_Steps]:
        """Where metrics are shown: a bar on a terminal, lines otherwise."""
        # rich takes a pipe for a terminal where FORCE_COLOR is set: colours are welcome there, a moving cursor is not
        if self._console.quiet or not (self._console.is_interactive and self._console.file.isatty()):
            yield _Steps(self, config, None)
            return
        room = min(self._console.width - BESIDE_BAR, 40)
        columns: list[ProgressColumn] = [TextColumn("step {task.completed}/{task.total} {task.percentage:3.0f}%")]
        columns += [BarColumn(bar_width=room)] if room > 0 else []
        columns += [TextColumn("{task.description}", table_column=Column())]  # the one that is wrapped
        with Progress(*columns, console=self._console) as bar:
            yield _Steps(self, config, bar)


class _Steps:
    def __init__(self, report: Report, config: TrainConfig, bar: Progress | None) -> None:
        self._report, self._config, self._bar = report, config, bar
        self._task = bar.add_task("", total=config.steps) if bar else None

    def begun(self, step: int) -> None:
        """The step's work was given to the device, and may go on there."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def show(self, metrics: Metrics) -> None:
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
    """The distinct shapes of the shards, as the ranks hold them. Of ranks that replicate each other one is asked: there may be thousands."""
    repeats = [
        axis
        for axis, placement in zip(layout.mesh.axis_names, layout.placements, strict=True)
        if not isinstance(placement, Shard)
    ]
    apart = len(repeats) < layout.mesh.ndim
    ranks = layout.mesh.select(**dict.fromkeys(repeats, 0)).ranks if apart else layout.mesh.ranks[:1]
    shapes = list(dict.fromkeys(layout.local_shape(shape, rank) for rank in ranks))
    return "" if shapes == [shape] else "shards " + ", ".join(str(list(shard)) for shard in shapes[:4])


def mesh_in_words(axes: Mapping[str, int]) -> str:
    """ "4 processes, mesh dp=2 x tp=2" """
    count = math.prod(axes.values())
    return f"{count:,} process{'es' if count > 1 else ''}, mesh {' x '.join(f'{axis}={size}' for axis, size in axes.items())}"


def describe(run: Run, *, gpus: int) -> str:
    """What runs, in one line, and what was left out of its text, in another."""
    device, backend = ("cuda", "nccl") if gpus else ("cpu", "gloo")
    line = (
        f"{run.title}: {size_in_words(run.config.model, run.config.model_class)}, on {run.corpus.name}; {device}, {backend}, "
        f"{mesh_in_words(run.axes)}"
    )
    left_out = (
        (run.corpus.skipped, "skipped", "file", "files", ", not UTF-8 text"),
        (run.corpus.passed, "passed over", "entry", "entries", ""),
    )
    for found, verb, one, several, why in left_out:
        if found:
            names = printable(", ".join(map(str, found[:NAMED]))) + (", ..." if len(found) > NAMED else "")
            line += f"\n{verb} {len(found)} {one if len(found) == 1 else several}{why}: {names}"
    return line


def _last(run: Run) -> str:
    """What is left of the model at the end."""
    if run.config.model_class is None:
        return "checkpoint/ for transformers"
    return f"checkpoint-{run.config.steps}/ to resume from; a model from outside has no form for transformers"


def next_steps(run: Run, losses: tuple[float, float], seconds: float, *, a_token: float, on_cpu: bool) -> str:
    """The closing lines.

    losses: on the text that is held out, before the first step and after the last. a_token: bytes of that text for each token,
    so that runs of several tokenizers can be compared.
    """
    first, last = losses
    bits = " -> ".join(f"{loss / math.log(2) / a_token:.2f}" for loss in losses) + " bits a byte"
    commands = "\n      ".join(suggestions(run, on_cpu=on_cpu))
    return (
        f"loss on held-out text {first:.4f} -> {last:.4f}, {bits}, in {seconds:.0f} s\n"
        f"saved {run.folder}: config.toml, metrics.jsonl, curves.svg, plan.txt, versions.json, and {_last(run)}"
        + (f"\nnext  {commands}" if commands else "")
    )
