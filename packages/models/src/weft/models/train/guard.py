"""What `weft check` computes of a run's step: the golden file (collectives with sites, memory, layouts), and hangs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from weft.reshard.extension import Recorded

from ..predict.golden import Allow, Command, Golden, Parameter, RankRecord
from ..predict.hang_report import Hang
from ..predict.hangs import NoHang
from ..predict.rank_kinds import check_plan
from ..predict.rank_record import join_parameters, record_sites
from ..step.memory import predict_memory
from ..step.record import RecordedStep, SharedRuns
from .config import TrainConfig
from .explanation import Outline
from .memory_check import gpu_count
from .optimizer import communicate_update
from .task_config import reference_of


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
