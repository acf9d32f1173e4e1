"""`PlanMemory`: the peak memory of a candidate's fullest rank, and a lower bound that shares runs on shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from weft.mesh import ProcessMesh

from ..step.alike import block_names, signature, standing_blocks
from ..step.memory import predict_memory
from ..step.record import StepShape, meta_copy
from .bounds import Parameters, layers_of_stages, weights_floor
from .memory import MemoryParts, compose, memory_parts, stage_peaks
from .pipeline_time import even_stages
from .plans import Candidate
from .trace import GATHERED_AHEAD
from .workload import Workload

LARGEST = 2**30
SHORT = 8  # blocks of a model of which the memory is composed as well as of the whole model's
RUN_MICROBATCHES = 2  # the second adds to the gradients of the first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanMemory:
    """The memory of a workload's plans."""

    workload: Workload
    parameters: Parameters
    least_tp: tuple[int, int] = (1, LARGEST)  # the two least sizes of tp above 1 in a search
    _models: list[nn.Module | None] = field(default_factory=list)
    _parts: dict[tuple[Candidate, int], MemoryParts | None] = field(default_factory=dict)
    _exact: dict[tuple[Candidate, int], int] = field(default_factory=dict)

    def weights_floor(self, candidate: Candidate, *, gradients: bool = True) -> float:
        """Bytes of weights, gradients and states below which the candidate's fullest rank does not stay."""
        return weights_floor(
            self.parameters,
            pp=candidate.pp,
            tp=candidate.tp,
            ep=candidate.ep,
            over_tp=candidate.over_tp,
            data=candidate.data_ranks,
            zero=candidate.zero,
            gradients=gradients,
        )

    def floor(self, candidate: Candidate) -> float:
        """Bytes below which rank 0 does not stay: with the activations of all microbatches in flight.

        What a block saves is in proportion to the rows and tokens on a rank. Gradients are not counted beside
        activations: they may come after the last of them.
        """
        weights = self.weights_floor(candidate)
        if candidate.ep > 1:
            return weights
        blocks = layers_of_stages(len(self.parameters.in_blocks), candidate.pp)[0]
        rows = candidate.rows_on_rank(self.workload.rows)
        saved = self._saved_floor(candidate) * blocks * rows / candidate.cp * in_flight(candidate)
        return max(weights, self.weights_floor(candidate, gradients=False) + saved)

    def _saved_floor(self, candidate: Candidate) -> float:
        """Bytes below which what a block saves of one row does not stay, by the candidate's options and its tp.

        A part of these bytes is in proportion to 1 / tp, and another does not depend on tp; for more than the two
        least sizes, both follow from these two.
        """
        first, second = self.least_tp
        if candidate.tp <= second:
            return self._saved(candidate, candidate.tp)
        at_first, at_second = self._saved(candidate, first), self._saved(candidate, second)
        divided = (at_first - at_second) / (1 / first - 1 / second)
        return at_second - divided * (1 / second - 1 / candidate.tp)

    def _saved(self, candidate: Candidate, tp: int) -> float:
        options: dict[str, Any] = {"recompute": candidate.recompute, "sequence": candidate.sequence and tp > 1}
        parts = self._parts_of(Candidate(pp=2, schedule="1f1b", tp=tp, **options), 1)
        return 0.0 if parts is None else parts.saved_per_block

    def peak(self, candidate: Candidate) -> int:
        """Bytes of the candidate's fullest rank, at most, of the stages' ranks at rank 0's place in a stage."""
        key = candidate, self.workload.rows
        if key not in self._exact:
            self._exact[key] = self._peak(candidate)
        return self._exact[key]

    def _peak(self, candidate: Candidate) -> int:
        traced = replace(candidate, microbatches=min(candidate.microbatches, RUN_MICROBATCHES))
        rows = self.workload.rows // candidate.microbatches
        if candidate.pp == 1:
            parts = self._parts_of(traced, rows)
            blocks = len(self.parameters.in_blocks)
            return self._whole(candidate) if parts is None else compose(parts, blocks=blocks).nbytes
        key = replace(traced, pp=2, schedule="1f1b", chunks=1, zero=2 if candidate.zero == 3 else candidate.zero)
        parts, schedule = self._parts_of(key, rows), candidate.make_schedule()
        if parts is None or schedule is None or schedule.splits_backward:
            return self._whole(candidate)
        ranges = even_stages(len(self.parameters.in_blocks), schedule.num_stages)
        return max(each.nbytes for each in stage_peaks(parts, schedule, ranges))

    def _parts_of(self, candidate: Candidate, rows: int) -> MemoryParts | None:
        """The parts of a step with `rows` rows in a microbatch; None for a model whose blocks are not alike.

        Raises ValueError for a candidate that the model refuses.
        """
        key = candidate, rows
        if key not in self._parts:
            model = self._short_model()
            self._parts[key] = None if model is None else self._run(model, candidate, rows)
        return self._parts[key]

    def _run(self, model: nn.Module, candidate: Candidate, rows: int) -> MemoryParts:
        mesh, plan = ProcessMesh.grid(**candidate.axes), self.workload.plan_of(candidate)
        shape = self._shape(candidate.microbatches, rows)
        with self.workload.autocast():
            return memory_parts(model, mesh, plan, shape, **self._options())

    def _whole(self, candidate: Candidate) -> int:
        """The peak from the whole step: of rank 0, and of the last stage."""
        mesh, shape = ProcessMesh.grid(**candidate.axes), self._shape(candidate.microbatches, 0)
        stride = candidate.processes // candidate.pp
        with self.workload.autocast():
            return max(
                predict_memory(
                    *(self.workload.model, mesh, self.workload.plan_of(candidate)),
                    rank=rank,
                    batch=(self.workload.rows, self.workload.tokens),
                    criterion=shape.criterion,
                    inputs=shape.inputs,
                    microbatches=candidate.microbatches,
                    reduce_dtype=shape.reduce_dtype,
                    **self._options(),
                ).nbytes
                for rank in sorted({0, (candidate.pp - 1) * stride})
            )

    def _options(self) -> dict[str, Any]:
        return {"states": self.workload.states, "clip_norm": self.workload.clip_norm, "device": "cuda"}

    def _shape(self, microbatches: int, rows: int) -> StepShape:
        return self.workload.shape(rows * microbatches, microbatches)

    def _short_model(self) -> nn.Module | None:
        """The model with fewer blocks, where all are alike: copying the whole model takes longer than a run on shapes.

        None for a model with too few blocks for one to stand for others.
        """
        if not self._models:
            self._models.append(_shorten(self.workload))
        return self._models[0]


def least_tp(candidates: Iterable[Candidate]) -> tuple[int, int]:
    """The two least sizes of tp above 1 of any candidate; with fewer, every size is run by itself."""
    sizes = sorted({candidate.tp for candidate in candidates} - {1})
    return (sizes[0], sizes[1]) if len(sizes) > 2 else (1, LARGEST)


def in_flight(candidate: Candidate) -> float:
    """Microbatches of which rank 0 holds the activations of all its blocks at once, at most."""
    count, ranks, chunks = candidate.microbatches, candidate.pp, candidate.chunks
    if candidate.schedule is None:
        return 1.0
    if candidate.schedule == "gpipe":
        return float(count)
    if chunks == 1:
        return float(min(count, ranks))
    size = count // max(1, count // ranks)  # of a round
    return min(count * chunks, (chunks - 1) * size + 2 * (ranks - 1) + 1) / chunks


def _shorten(workload: Workload) -> nn.Module | None:
    names = block_names(workload.model, workload.plan_of(Candidate()))
    signatures = [signature(workload.model.get_submodule(name), name) for name in names]
    if all(len(each.blocks) == 1 for each in standing_blocks(signatures, GATHERED_AHEAD)):
        return None
    if len(names) <= SHORT or len(set(signatures)) > 1:
        return workload.model
    model = meta_copy(workload.model)
    parent, _, own = names[0].rpartition(".")[0].rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, own, nn.ModuleList(list(getattr(holder, own))[:SHORT]))
    return model
