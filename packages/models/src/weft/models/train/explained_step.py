"""What `weft explain` and `weft check` run on shapes of a run's training step.

`ExplainedStep`: the text of `weft explain` about a rank's step. `make_golden`: the golden file of the step (collectives
with sites, memory, layouts). `check_run`: the calls of all ranks, matched to find hangs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from weft.reshard.extension import Recorded

from ..parallel.batch import cuts_by_documents
from ..predict.forks import Forks
from ..predict.golden import Allow, Command, Golden, Parameter, RankRecord
from ..predict.hang_report import Hang
from ..predict.hangs import NoHang
from ..predict.memory import MemoryParts
from ..predict.rank_kinds import check_plan
from ..predict.rank_record import join_parameters, record_sites
from ..step.followed_step import Memory, Peak, total_of
from ..step.memory import bytes_of_parameters, predict_memory
from ..step.record import RecordedStep, SharedRuns
from .config import TrainConfig
from .explanation import Outline
from .measure import flops_per_token
from .memory_check import gpu_count
from .model_class import parameters_of
from .optimizer import communicate_update, count_states
from .recipes import size_in_words
from .report import ParameterLayout, Report, mesh_in_words
from .task_config import reference_of

_PHASE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "gradients": "the sum of gradients",
    "optimizer": "the optimizer's update",
}
_POWERS = ("", "k", "M", "G", "T", "P", "E", "Z")


class ExplainedStep:
    """The step of a rank that `weft explain` prints. The cost does not grow with the mesh. Communication: none.

    config, axes: as for `Outline.of`, which may raise ValueError. rank: of the mesh.
    """

    def __init__(self, config: TrainConfig, axes: Mapping[str, int], rank: int) -> None:
        self._config, self._axes, self._rank = config, axes, rank
        self._outline = Outline.of(config, axes, "cuda" if gpu_count() else "cpu")

    @property
    def runs(self) -> tuple[Callable[[], Any], ...]:
        """The functions for `Forks` that run the step on shapes. The longest is first."""
        return self._record, self._memory_parts

    def _record(self) -> tuple[RecordedStep, Memory]:
        """The step of the rank, and the bytes that the rank holds from step to step.

        Raises ValueError for a model that the plan cannot lay out.
        """
        outline, shared = self._outline, SharedRuns()
        step = outline.record_step(self._rank, "cpu", shared=shared)
        model = outline.make_model()
        held = bytes_of_parameters(
            *(model, outline.mesh, outline.plan),
            rank=self._rank, states=count_states(model, self._config.optimizer), known_cut=shared.cut,
        )  # fmt: skip
        return step, total_of(held)

    def _memory_parts(self) -> MemoryParts | None:
        return self._outline.memory_parts(self._rank)

    def print(self, title: str, forks: Forks) -> MemoryParts | None:
        """Print the layouts, schedule, collectives, memory and operations of the rank in a training step.

        title: of the run. forks: makes the runs on shapes.
        Returns the parts of the memory of rank 0, for a prediction on a chip; None for another rank, and without parts.
        """
        report, outline, rank, config = Report(enabled=True), self._outline, self._rank, self._config
        step, held = forks.result(self._record)
        coordinate = outline.mesh.coordinate(rank)
        assert coordinate is not None, "the rank is one of the mesh"
        report.print_line(
            f"{title}: {size_in_words(config.model, config.model_class)}; {mesh_in_words(self._axes, config.mesh.ep)}"
        )
        report.print_line(_batch_line(outline))
        if outline.mesh.size > 1:
            report.print_line(f"rank {rank} is at {', '.join(f'{axis}={index}' for axis, index in coordinate.items())}")
        parameters = [
            ParameterLayout(name=name, shape=step.shapes[name], layout=layout) for name, layout in step.layouts.items()
        ]
        report.print_layout(parameters, "" if step.schedule is None else f" of rank {rank}'s stage")
        if step.schedule is not None:
            report.print_schedule(step.schedule)
        if outline.tokens_line is not None:
            report.print_line(outline.tokens_line)
        by_documents = config.data.pack and cuts_by_documents(outline.mesh, outline.plan)
        report.print_prediction(step.communication, rank, documents="unknown" if by_documents else None)
        frozen = 0
        if reference_of(config) == "model":
            of_reference = Outline.of_reference(config, self._axes)
            frozen = predict_memory(
                of_reference.make_model().requires_grad_(False), of_reference.mesh, of_reference.plan, rank=rank
            ).nbytes
        report.print_line(_memory_table(held, rank, frozen))
        parts = forks.result(self._memory_parts)
        report.print_line(_peak_table(outline.predict_peak(rank, step.schedule, parts), frozen))
        return parts if rank == 0 else None


def _batch_line(outline: Outline) -> str:
    """The line about the batch: size, microbatches, operations."""
    (rows, T), count = outline.batch_shape, outline.num_microbatches
    _, multiplying = parameters_of(outline.config.model, outline.config.model_class)
    tokens, token_flops = rows * T, flops_per_token(outline.config.model, T, multiplying=multiplying)
    in_microbatches = f" in {count} microbatches" if count > 1 else ""
    counts = (token_flops, token_flops * tokens, token_flops * tokens / outline.mesh.size)
    flops = [_with_decimal_prefix(count) for count in counts]
    return (
        f"batch {rows:,} x {T:,} tokens{in_microbatches}; {flops[0]}FLOP a token, {flops[1]}FLOP a step, "
        f"{flops[2]}FLOP of each process"
    )


def _memory_table(memory: Memory, rank: int, frozen: int) -> str:
    """The table of the memory that the rank holds from step to step. frozen: bytes of a reference model; 0 without."""
    rows = {
        "parameters": memory.parameters,
        "gathered from shards": memory.gathered,
        "gradients": memory.gradients,
        "optimizer state": memory.states,
        "reference model": frozen,
        "in all": memory.nbytes + frozen,
    }
    optional = ("gathered from shards", "reference model")
    shown = {name: nbytes for name, nbytes in rows.items() if nbytes or name not in optional}
    return "\n".join([f"memory of rank {rank}, without activations", *_rows(shown)])


def _peak_table(peak: Peak, frozen: int) -> str:
    """The table of the rank's memory at the peak of a step, gradients not added up. frozen: as in `_memory_table`."""
    rows = {
        "parameters": peak.parameters,
        "gathered from shards": peak.gathered,
        "gradients": peak.gradients,
        "gradients in buckets": peak.buckets,
        "optimizer state": peak.states,
        "activations": peak.activations,
        "recomputed": peak.recomputed,
        "logits and loss": peak.logits,
        "messages": peak.messages,
        "workspace": peak.workspace,
        "reference model": frozen,
        "in all": peak.nbytes + frozen,
    }
    phase = _PHASE_WORDS[peak.phase]
    return "\n".join([f"at the peak of a step on a GPU, in {phase}", *_rows({k: n for k, n in rows.items() if n})])


def _rows(table: Mapping[str, int]) -> list[str]:
    return [f"  {name:20}  {nbytes:>17,} bytes  {_in_mib_or_gib(nbytes):>10}" for name, nbytes in table.items()]


def _with_decimal_prefix(number: float) -> str:
    """A number with a decimal prefix: "45.0 G"."""
    power = min(int(math.log10(max(number, 1)) // 3), len(_POWERS) - 1)
    return f"{number / 1000**power:.3g} {_POWERS[power]}"


def _in_mib_or_gib(nbytes: int) -> str:
    """A number of bytes as text: "1.31 GiB"."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def make_golden(
    config: TrainConfig,
    axes: Mapping[str, int],
    command: Command,
    *,
    device_type: str,
    ranks: Sequence[int],
    allow: Allow | None = None,
) -> Golden:
    """The content of a golden file, from steps of the run on shapes.

    config, axes: as for `Outline.of`. command: the command by which `weft check` makes the file again.
    device_type: of the run, "cpu" or "cuda". ranks: the ranks to record, from `ranks_of_stages`.
    allow: the differences accepted by `weft check`; None: the defaults of `Allow`.
    Cost: three steps on shapes for each rank. Communication: none.
    Raises ValueError where the plan cannot lay out the model.
    """
    outline = Outline.of(config, axes, device_type)
    records: list[RankRecord] = []
    parameters: dict[str, Parameter] = {}
    update = partial(communicate_update, config=config.optimizer)
    for rank in ranks:
        with outline.autocast_context("cpu"):
            step = record_sites(
                *(outline.make_model(), outline.mesh, outline.plan, outline.step_shape(rank)),
                clip_norm=config.optimizer.clip_norm,
                update=update,
            )
        parameters |= step.parameters
        records.append(RankRecord(rank=rank, collectives=step.collectives, memory=_memory(outline, axes, rank)))
    return Golden(
        command=command,
        device=device_type,
        mesh=dict(axes),
        batch=outline.batch_shape,
        allow=allow or Allow(),
        ranks=tuple(records),
        parameters=join_parameters(parameters),
    )


def ranks_of_stages(axes: Mapping[str, int]) -> tuple[int, ...]:
    """The first rank of each pipeline stage. axes: the mesh's axes with their sizes, "pp" first."""
    stages = axes.get("pp", 1)
    size = 1
    for axis, each in axes.items():
        size *= 1 if axis == "pp" else each
    return tuple(stage * size for stage in range(stages))


def check_run(config: TrainConfig, axes: Mapping[str, int]) -> NoHang | Hang:
    """Records the calls of the ranks in a training step of a run, on shapes, and matches the calls between ranks.

    config, axes: as for `Outline.of`. Communication: none.
    Raises ValueError where the plan cannot lay out the model.
    """
    outline = Outline.of(config, axes, "cuda" if gpu_count() else "cpu")

    shared = SharedRuns()

    def record_rank(rank: int, listen: Callable[[Recorded], None]) -> RecordedStep:
        return outline.record_step(rank, "cpu", listen=listen, shared=shared)

    batch = outline.microbatch_rows, outline.batch_shape[1]
    return check_plan(record_rank, outline.mesh, outline.plan, batch=batch)


def _memory(outline: Outline, axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The bytes of a rank's memory by kind, as "parameters"; kinds without bytes are left out."""
    memory = outline.predict_memory(rank)
    found = {each.name: int(getattr(memory, each.name)) for each in dataclasses.fields(memory) if each.name != "peak"}
    if reference_of(outline.config) == "model":
        reference = Outline.of_reference(outline.config, axes)
        with torch.no_grad():
            found["reference model"] = predict_memory(
                reference.make_model().requires_grad_(False), reference.mesh, reference.plan, rank=rank
            ).nbytes
    return {name: nbytes for name, nbytes in found.items() if nbytes}
