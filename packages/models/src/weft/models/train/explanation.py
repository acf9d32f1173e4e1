"""The output of `weft explain`: a training step, computed on shapes without weights or processes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..memory import Memory, predict_memory
from .config import TrainConfig
from .optimizer import states_per_element
from .outline import Outline
from .outside import parameters_of
from .recipes import size_in_words
from .report import Part, Report, mesh_in_words
from .speed import flops_per_token

_POWERS = ("", "k", "M", "G", "T", "P", "E", "Z")


def explain(recipe: str, config: TrainConfig, axes: Mapping[str, int], rank: int) -> None:
    """Print the layouts, schedule, collectives, memory and operations of `rank` in a training step.

    recipe: the title of the run. config: with a settled plan. axes: the mesh's axes with their sizes.
    The cost does not grow with the mesh. Communication: none.
    Raises ValueError for a model that the plan cannot lay out.
    """
    report, outline = Report(speaks=True), Outline.of(config, axes)
    step = outline.first_step(rank, "cpu")
    at = outline.mesh.coordinate(rank)
    assert at is not None, "the rank is one of the mesh"
    report.line(f"{recipe}: {size_in_words(config.model, config.model_class)}; {mesh_in_words(axes)}")
    report.line(_batch(outline))
    if outline.mesh.size > 1:
        report.line(f"rank {rank} is at {', '.join(f'{axis}={index}' for axis, index in at.items())}")
    parts = [Part(name=name, shape=step.shapes[name], layout=layout) for name, layout in step.layouts.items()]
    report.layout(parts, "" if step.schedule is None else f" of rank {rank}'s stage")
    if step.schedule is not None:
        report.schedule(step.schedule)
    report.predicted(step.communication, rank)
    states = states_per_element(config.optimizer)
    memory = predict_memory(outline.make_model(), outline.mesh, outline.plan, rank=rank, states=states)
    report.line(_memory(memory, rank))


def _batch(outline: Outline) -> str:
    """The line about the batch: size, microbatches, operations."""
    (rows, T), count = outline.batch, outline.microbatches
    _, multiplying = parameters_of(outline.config.model, outline.config.model_class)
    tokens, a_token = rows * T, flops_per_token(outline.config.model, T, multiplying=multiplying)
    parts = f" in {count} microbatches" if count > 1 else ""
    return (
        f"batch {rows:,} x {T:,} tokens{parts}; {_short(a_token)}FLOP a token, {_short(a_token * tokens)}FLOP a step, "
        f"{_short(a_token * tokens / outline.mesh.size)}FLOP of each process"
    )


def _memory(memory: Memory, rank: int) -> str:
    """The table of the rank's memory."""
    rows = {
        "parameters": memory.parameters,
        "gathered from shards": memory.gathered,
        "gradients": memory.gradients,
        "optimizer state": memory.states,
        "in all": memory.nbytes,
    }
    rows = {name: nbytes for name, nbytes in rows.items() if nbytes or name != "gathered from shards"}
    lines = [f"  {name:20}  {nbytes:>17,} bytes  {_binary(nbytes):>10}" for name, nbytes in rows.items()]
    return "\n".join([f"memory of rank {rank}, without activations", *lines])


def _short(number: float) -> str:
    """A number with a decimal prefix: "45.0 G"."""
    power = min(int(math.log10(max(number, 1)) // 3), len(_POWERS) - 1)
    return f"{number / 1000**power:.3g} {_POWERS[power]}"


def _binary(nbytes: int) -> str:
    """Bytes in MiB or GiB: "1.31 GiB"."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
