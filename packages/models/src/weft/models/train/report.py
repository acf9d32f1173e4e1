"""The terminal output of a training run, printed by `Report` on rank 0, in the order of the run."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from weft.mesh import Layout, Shard

from ..schedules.schedule import IDLE, Schedule
from ..step.communication import PHASES, Communication
from ..terminal import printable
from .config import TrainConfig
from .recipes import size_in_words
from .run import Run
from .suggestions import suggestions

SKIPPED_NAMES_SHOWN = 3
# Largest relative difference between the mean loss on the mesh and on one process, by the dtype of the computation, for
# `check_loss`: about 2**-20 and 2**-10. Partial sums have 24 bits in float32 and 8 in bfloat16. The error of the mean
# is smaller than a single token's, because the tokens' errors have both signs.
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-3}
METRICS_COLUMNS = 139  # width of the metrics beside the progress bar; a narrower terminal gets no bar
# What is held out, in words.
_HELD_OUT = {"pretrain": "text", "sft": "answers", "dpo": "pairs", "kto": "completions"}
# Fields of Metrics, computed by step_metrics.py. `Results` leaves a group out where all values are None.
ROUTER_METRICS = ("balance", "z", "busiest_expert")  # models with experts
PREFERENCE_METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy", "kl")  # dpo and kto


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics of a step: a line of metrics.jsonl, also shown on the terminal and sent to trackers.

    Made by `Trainer.read_metrics`. Speeds and shares of time are averages over the steps between two calls.
    """

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
    balance: float | None = None  # the balance loss, before its coefficient; None without experts
    z: float | None = None  # the routers' mean squared logsumexp; None without experts
    busiest_expert: float | None = None  # in each layer most tokens of an expert / mean; the largest of all layers
    # mean implicit reward in the step: for dpo of chosen answers, for kto of desirable completions; None without any
    rewards_chosen: float | None = None
    # the same for dpo's rejected answers and kto's undesirable completions; None without any
    rewards_rejected: float | None = None
    rewards_margin: float | None = None  # rewards_chosen - rewards_rejected; None without one of the two
    rewards_accuracy: float | None = None  # share of pairs whose chosen answer has the higher reward; None for kto
    kl: float | None = None  # kto's divergence of the model from the reference; None for dpo
    # e**held_out_loss, at most e**700, near the largest float; None for dpo and kto, whose losses are of no tokens
    perplexity: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.held_out_loss is not None and self.rewards_margin is None and self.kl is None:
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
        if self.busiest_expert is not None:
            shown.insert(2, f"balance {self.balance:.3f}  busiest expert {self.busiest_expert:.2f}x")
        if self.rewards_margin is not None:
            accuracy = "" if self.rewards_accuracy is None else f" (accuracy {self.rewards_accuracy:.0%})"
            shown.insert(2, f"margin {self.rewards_margin:.4f}{accuracy}")
        rewards = self.rewards_chosen, self.rewards_rejected
        if rewards != (None, None):
            shown.insert(2, "rewards " + "/".join("none" if each is None else f"{each:.4f}" for each in rewards))
        if self.held_out_loss is not None:
            perplexity = "" if self.perplexity is None else f" (perplexity {self.perplexity:.4g})"
            shown.insert(1, f"held out {self.held_out_loss:.4f}{perplexity}")
        return "  ".join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """A parameter's shape and layout on the ranks that hold it.

    Made by `find_parameter_layouts` and `explain`; printed by `Report.print_layout`, written to plan.txt by `Results`.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None  # None if unsharded, on a single process
    # Coordinate on "pp" of the parameter's ranks. None without a pipeline, and in `weft explain`, whose table is of a
    # single stage.
    stage_rank: int | None = None


class Report:
    """Prints the progress of a run, or the step of `weft explain`.

    Made by `Trainer` in every process, and by `ExplainedStep.print`.
    enabled: whether to print at all; in a run, true on rank 0 only.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def print_lines(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.print_line(text)

    @property
    def width(self) -> int:
        """Columns of the terminal, at most 120."""
        return min(self._console.width, 120)

    def print_layout(self, parameters: Sequence[ParameterLayout], heading_suffix: str = "") -> None:
        """Print a line per kind of parameter: shape, layout, shard shapes, and the coordinates on "pp" of the holders.

        A kind is all parameters with equal general names, shapes and layouts.
        parameters: of all stages in a run, of a single stage in `weft explain`; in the model's order.
        heading_suffix: added to the heading by `weft explain`, to name the stage.
        """
        kinds: dict[tuple[str, ...], list[ParameterLayout]] = {}
        for each in parameters:
            layout = "whole, on one process" if each.layout is None else str(each.layout)
            shards = "" if each.layout is None else _shard_shapes(each.layout, each.shape)
            kinds.setdefault((general_name(each.name), str(list(each.shape)), layout, shards), []).append(each)
        self.print_line(f"layout of the parameters{heading_suffix}")
        rows = []
        for (name, shape, layout, shards), of_kind in kinds.items():
            count = len({each.name for each in of_kind})
            stage_ranks = sorted({each.stage_rank for each in of_kind if each.stage_rank is not None})
            stages = f"on pp={', '.join(map(str, stage_ranks))}" if stage_ranks else ""
            rows.append((name, f"{shape} x {count}" if count > 1 else shape, layout, shards, stages))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
            self.print_line("  " + "  ".join(cells).rstrip())

    def print_schedule(self, schedule: Schedule) -> None:
        """Print the pipeline schedule, with what its cells mean."""
        self.print_line(
            f"schedule of the pipeline, in microbatches: F forward, B gradients of inputs, W gradients of weights, "
            f"{IDLE} idle\n{schedule}"
        )

    def print_prediction(
        self, predicted: Communication, rank: int = 0, *, documents: Literal["known", "unknown"] | None = None
    ) -> None:
        """Print the predicted collectives of a step, with the bytes received by `rank`.

        Called at the start of a run on rank 0, and by `weft explain` for any `rank`.
        documents: None unless ranks along "cp" exchange keys by the documents of packed rows. "known", in a run:
            predicted from the documents of step 1. "unknown", in `weft explain`: predicted without documents, with
            all-gathers of keys in place of the exchanges.
        """
        of_what = "of step 1, by its documents" if documents == "known" else "a step"
        self.print_line(
            f"collectives {of_what}, predicted by running the model on shapes; bytes that rank {rank} receives"
        )
        for line in str(predicted).splitlines():
            self.print_line(f"  {line}")
        if documents == "known":
            self.print_line("  the all-to-alls over cp are exchanges of keys by documents; each step has its own")
        elif documents == "unknown":
            self.print_line(
                "  packed rows of prepared data exchange keys by documents, in place of the all-gathers and "
                "reduce-scatters\n  of keys over cp: at most as many bytes, and fewer the shorter the documents; "
                "weft train prints those of step 1"
            )

    def print_issued(self, predicted: Communication, issued: Communication) -> None:
        """Print the collectives issued by step 1, and whether each phase is as predicted or below a bound."""
        self.print_line("collectives of step 1, as issued")
        width = max(len(issued.select(phase=phase).summary) for phase in PHASES)
        for phase in PHASES:
            actual, expected = issued.select(phase=phase), predicted.select(phase=phase)
            if phase == "optimizer" and not (actual.entries or expected.entries):
                continue  # an elementwise optimizer
            as_many = expected.nbytes == actual.nbytes or (expected.at_most and actual.nbytes < expected.nbytes)
            verdict = "NOT as predicted"
            if actual.counts == expected.counts and as_many:
                verdict = "as predicted" if actual.nbytes == expected.nbytes else "within the prediction"
            self.print_line(f"  {phase:10} {actual.summary:{width}}  {actual.nbytes:>13,} bytes  {verdict}")

    def check_loss(self, loss: float, loss_alone: float, processes: int, dtype: str) -> bool:
        """Print the loss of step 1 beside the loss on one process; return whether both agree within rounding.

        loss_alone: on one process. dtype: of the computation, for the allowed difference (ROUNDING).
        The difference is relative to `loss_alone`, or absolute where that is below 1: the error of a loss comes from
        the rounding of the logits, whose size does not shrink as the loss goes to 0.
        """
        difference = abs(loss - loss_alone) / max(abs(loss_alone), 1.0)
        is_within = difference <= ROUNDING[dtype]
        self.print_line(
            f"check  loss of step 1: {loss:.7f} on {processes} process{'es' if processes > 1 else ''}, "
            f"{loss_alone:.7f} on one: {'within' if is_within else 'NOT within'} {ROUNDING[dtype]:.0e}, as {dtype} "
            f"rounds; relative difference {difference:.1e}"
        )
        return is_within

    def print_checkpoint_cost(self, count: int, *, blocked: float, writing: float) -> None:
        """Print the cost of the checkpoints.

        blocked: seconds of training spent waiting for checkpoints. writing: seconds of writing.
        """
        self.print_line(
            f"checkpoints  {count} written in {writing:.2f} s, while the run went on; it waited {blocked:.3f} s for "
            f"them, {blocked / writing:.1%} of that"
        )

    @contextlib.contextmanager
    def show_steps(self, config: TrainConfig) -> Iterator[StepDisplay]:
        """Context in which metrics are shown: as a progress bar on a terminal, as lines otherwise."""
        # With FORCE_COLOR, rich takes a pipe for a terminal. Colors are welcome there, a moving cursor is not.
        if self._console.quiet or not (self._console.is_interactive and self._console.file.isatty()):
            yield StepDisplay(self, config, None)
            return
        bar_width = min(self._console.width - METRICS_COLUMNS, 40)
        columns: list[ProgressColumn] = [TextColumn("step {task.completed}/{task.total} {task.percentage:3.0f}%")]
        columns += [BarColumn(bar_width=bar_width)] if bar_width > 0 else []
        # wraps on a narrow terminal
        columns += [TextColumn("{task.description}", table_column=Column())]
        with Progress(*columns, console=self._console) as bar:
            yield StepDisplay(self, config, bar)


class StepDisplay:
    """Shows the metrics of steps, on the progress bar or as lines. Made by `Report.show_steps`."""

    def __init__(self, report: Report, config: TrainConfig, bar: Progress | None) -> None:
        self._report, self._config, self._bar = report, config, bar
        self._task = bar.add_task("", total=config.steps) if bar else None

    def advance(self, step: int) -> None:
        """Move the bar to `step`, counted from 1. Called once the step is queued; the device may still compute it."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def show(self, metrics: Metrics) -> None:
        """Show a step's metrics. Called for each result of `Trainer.read_metrics`.

        The bar shows every call. Without a bar, a line is printed for the first and the last step, for each multiple
        of `log_every`, and for a step with an evaluation.
        """
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=metrics.step, description=str(metrics))
        elif (
            metrics.step in (1, self._config.steps)
            or metrics.step % self._config.log_every == 0
            or metrics.held_out_loss is not None
        ):
            width = len(str(self._config.steps))
            self._report.print_line(f"step {metrics.step:{width}}/{self._config.steps} {metrics.done:4.0%}  {metrics}")


@lru_cache(maxsize=256)  # layers are alike
def _shard_shapes(layout: Layout, shape: tuple[int, ...]) -> str:
    """At most four of the distinct shard shapes over the ranks, as text; empty if every shard has the full shape.

    Ranks that hold the same shard count once, because there may be thousands of ranks.
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


def mesh_in_words(axes: Mapping[str, int], ep: int = 1) -> str:
    """The mesh as text: "4 processes, mesh dp=2 x tp=2", for the first lines of `weft train` and `weft explain`.

    ep: the number of processes over which a layer's experts are divided.
    """
    count = math.prod(axes.values())
    return (
        f"{count:,} process{'es' if count > 1 else ''}, "
        f"mesh {' x '.join(f'{axis}={size}' for axis, size in axes.items())}"
        + (f", experts over ep={ep}" if ep > 1 else "")
    )


def opening_lines(run: Run, *, gpus: int) -> str:
    """The first lines of a run's output: the model, data and mesh, then files and entries of the data left unread.

    Printed by the command `weft train` before `launch`.
    "skipped" are files that are not UTF-8 text; "passed over" are entries that are no files, for example sockets.
    gpus: the number of GPUs; with 0 the run computes on CPUs.
    """
    device, backend = ("cuda", "nccl") if gpus else ("cpu", "gloo")
    line = (
        f"{run.title}: {size_in_words(run.config.model, run.config.model_class)}, on {run.corpus.name}; {device}, "
        f"{backend}, {mesh_in_words(run.axes, run.config.mesh.ep)}"
    )
    left_out = (
        (run.corpus.skipped, "skipped", "file", "files", ", not UTF-8 text"),
        (run.corpus.passed, "passed over", "entry", "entries", ""),
    )
    for found, verb, singular, plural, why in left_out:
        if found:
            names = ", ".join(map(str, found[:SKIPPED_NAMES_SHOWN]))
            more = ", ..." if len(found) > SKIPPED_NAMES_SHOWN else ""
            line += f"\n{verb} {len(found)} {singular if len(found) == 1 else plural}{why}: {printable(names)}{more}"
    return line


def _final_model(run: Run) -> str:
    """Where the run's final model is, in words for the closing lines.

    A model class of the user's own is not saved for transformers: only its checkpoints remain. Options of experts that
    transformers lacks are saved for Weft alone.
    """
    if run.adapter_base is not None:
        return f"checkpoint/, adapters for peft, of {run.adapter_base}"
    if run.config.model_class is None:
        is_for_transformers = getattr(run.config.model, "is_hugging_face", True)
        return "checkpoint/ for " + ("transformers" if is_for_transformers else "Weft alone (model_type weft_moe)")
    return f"checkpoint-{run.config.steps}/ to resume from; a model from outside has no form for transformers"


def closing_lines(
    run: Run,
    losses: tuple[float | None, float | None],
    seconds: float | None,
    *,
    bytes_per_token: float | None,
    on_cpu: bool,
) -> str:
    """The closing lines of a run: losses on held-out data, the saved files, and commands to try next.

    losses: on the held-out data, before the first step and after the last; None if nothing is held out.
    seconds: of training; None if no step was taken, as when a run without steps left is resumed.
    bytes_per_token: of the held-out text, to print losses in bits per byte, comparable between tokenizers; None for
        examples.
    """
    first, last = losses
    if first is None or last is None:
        trained = "no step was taken" if seconds is None else f"trained in {seconds:.0f} s"
        line = f"{trained}; nothing was held out of fewer than 20 examples"
    else:
        line = f"loss on held-out {_HELD_OUT[run.config.task]} {first:.4f} -> {last:.4f}"
        if bytes_per_token is not None:
            bits = [f"{loss / math.log(2) / bytes_per_token:.2f}" for loss in (first, last)]
            line += f", {' -> '.join(bits)} bits a byte"
        line += "; no step was taken" if seconds is None else f", in {seconds:.0f} s"
    commands = "\n      ".join(suggestions(run, on_cpu=on_cpu))
    return (
        f"{line}\n"
        f"saved {run.folder}: config.toml, metrics.jsonl, curves.svg, plan.txt, versions.json, and {_final_model(run)}"
        + (f"\nnext  {commands}" if commands else "")
    )


def general_name(parameter: str) -> str:
    """A parameter's name with a star for the layer's number: "layers.*.mlp.up_proj.weight".

    Called by `Report.print_layout`, and by `Results.begin` for plan.txt, to show alike parameters once.
    """
    return re.sub(r"\.\d+\.", ".*.", parameter)
