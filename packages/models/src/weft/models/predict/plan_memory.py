"""`PlanMemory`: the peak bytes of a candidate's fullest rank, and lower bounds. Candidates share runs on shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn
from weft.mesh import ProcessMesh

from ..step.alike import block_names, choose_representatives, copy_blocks, signature
from ..step.memory import predict_memory
from .bounds import Parameters, layers_of_stages, weights_floor
from .memory import MemoryParts, SavedParts, compose, memory_parts, saved_parts, stage_peaks, undivided_bytes
from .pipeline_time import even_stages
from .plan_runs import KnownRuns
from .plans import Candidate
from .schedule_bounds import bounds_of
from .trace import GATHERED_AHEAD
from .workload import Workload

T = TypeVar("T")
LARGEST = 2**30  # no tp is larger
SHORT = 8  # blocks enough to compose the memory of a model of alike blocks
MEMORY_MICROBATCHES = 2  # the second adds to the gradients of the first
# The bytes that a block saves for backward depend on these options of a candidate, and on rows, "tp", "cp" and context.
_SAVED_BY = attrgetter("ep", "sequence", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanMemory:
    """Predicts the memory of a workload's plans. Made by `search_plans` and `Predictor`."""

    workload: Workload
    parameters: Parameters
    # From `least_tp`. For a tp above the second, `floor` follows from runs with these two; else from runs with the tp.
    run_tps: tuple[int, int] = (1, LARGEST)
    # The results of `run` and of `run_forward`; None for a model without alike blocks.
    parts: KnownRuns[MemoryParts | None] = field(init=False)
    saved: KnownRuns[SavedParts | None] = field(init=False)
    _models: list[nn.Module | None] = field(default_factory=list)  # of `_short_model`, once known
    _peaks: dict[tuple[Candidate, int], int] = field(default_factory=dict)  # peaks, by candidate and rows of a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", KnownRuns(self.run))  # the dataclass is frozen
        object.__setattr__(self, "saved", KnownRuns(self.run_forward))

    def weights_floor(self, candidate: Candidate, *, gradients: bool = True) -> float:
        """A lower bound of the fullest rank's bytes: weights, optimizer states and, if asked for, gradients."""
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
        """A lower bound of `peak`, with the activations of all microbatches in flight on rank 0.

        Gradients are counted together with activations only if a step has more microbatches than are in flight: a
        forward pass then follows a backward pass. Never where the schedule splits the backward.
        With "ep": `weights_floor`.
        """
        if candidate.ep > 1:
            return self.weights_floor(candidate)
        return self._floor(candidate, self._saved_floor(candidate))

    def known_floor(self, candidate: Candidate) -> float:
        """A lower bound of `peak` like `floor`, from the runs on shapes made until now: without a further run.

        The saved bytes are a + b * rows. So half the rows save at least half the bytes, and so do twice the
        ranks along "tp" or "cp". A run with tensors gathered over "cp" tells only of candidates with the same gathers.
        """
        rows, options = candidate.rows_on_rank(self.workload.rows), _SAVED_BY(candidate)
        saved = 0.0
        if candidate.ep == 1:
            of_peaks = {key: parts.saved for key, parts in self.parts.results().items() if parts is not None}
            for (known, known_rows), parts in (of_peaks | self.saved.results()).items():
                has_equal_options = _SAVED_BY(known) == options and (known.pp > 1) == (candidate.pp > 1)
                if parts is not None and has_equal_options and known.context in (None, candidate.context):
                    share = min(1.0, rows / -(-known_rows // known.dp))
                    share *= min(1.0, known.cp / candidate.cp) * min(1.0, known.tp / candidate.tp)
                    saved = max(saved, share * self._saved_bytes(candidate, parts))
        return self._floor(candidate, saved)

    def _floor(self, candidate: Candidate, saved: float) -> float:
        """`floor`, given the least bytes that rank 0 saves for a microbatch."""
        adds = candidate.microbatches > in_flight(candidate) and not candidate.splits_backward
        with_saved = self.weights_floor(candidate, gradients=adds) + saved * in_flight(candidate)
        if candidate.zero == 3 and candidate.pp == 1 and self.parameters.in_blocks:
            # The backward pass begins with the last block, whose parameters are gathered.
            with_saved += self.parameters.in_blocks[-1] / candidate.tp * (1 - 1 / candidate.data_ranks)
        return max(self.weights_floor(candidate), with_saved)

    def _saved_floor(self, candidate: Candidate) -> float:
        """A lower bound of the bytes that rank 0 saves for a microbatch, with a part of the bytes common to all.

        The bytes are a + b * tokens: copies of weights in another dtype do not depend on tokens. a and b follow from
        one row and from two. Tensors gathered over "cp" are left out.
        """
        rows = candidate.rows_on_rank(self.workload.rows) / candidate.cp
        of_row = self._saved_at(candidate, 1)
        return of_row if rows == 1 else of_row + (self._saved_at(candidate, 2) - of_row) * (rows - 1)

    def _saved_at(self, candidate: Candidate, rows: int) -> float:
        """A lower bound of the bytes that rank 0 saves for `rows` rows, by the candidate's options and tp.

        The bytes are a + b / tp. For a larger tp than the two of `run_tps`, a and b follow from these two.
        """
        if candidate.tp <= self.run_tps[1]:
            return self._saved(candidate, candidate.tp, rows)
        first, second = self.run_tps
        at_first, at_second = (self._saved(candidate, tp, rows) for tp in (first, second))
        divided = (at_first - at_second) / (1 / first - 1 / second)
        return at_second - divided * (1 / second - 1 / candidate.tp)

    def _saved(self, candidate: Candidate, tp: int, rows: int) -> float:
        parts = self.saved.of(_floor_run(candidate, tp), rows)
        return 0.0 if parts is None else self._saved_bytes(candidate, parts)

    def _saved_bytes(self, candidate: Candidate, parts: SavedParts) -> float:
        """The bytes that rank 0 saves for a microbatch, with a part of the bytes common to all."""
        blocks = layers_of_stages(len(self.parameters.in_blocks), candidate.pp)[0]
        per_block = parts.per_block + parts.shared_per_block / in_flight(candidate)
        return blocks * per_block + parts.before + (parts.after if candidate.pp == 1 else 0.0)

    def floor_runs(self, candidate: Candidate) -> list[tuple[Candidate, int]]:
        """The arguments of the runs by `saved` from which `floor` follows."""
        if candidate.ep > 1:
            return []
        tps = (candidate.tp,) if candidate.tp <= self.run_tps[1] else self.run_tps
        counts = (1,) if candidate.rows_on_rank(self.workload.rows) == candidate.cp else (1, 2)
        return [(_floor_run(candidate, tp), rows) for rows in counts for tp in tps]

    def gathered_floor(self, candidate: Candidate) -> float:
        """A lower bound of `peak`: under zero=3 with the parameters gathered while activations are held.

        From a step of two ranks along "dp", each with as many tokens as a rank of the candidate: the step serves all
        sizes of "dp" and "cp". Tensors gathered over "cp" are left out. `weights_floor` where no run serves.
        """
        runs = self.gathered_runs(candidate)
        parts = self.parts.of(*runs[0]) if runs else None
        if parts is None:
            return self.weights_floor(candidate)
        blocks = len(self.parameters.in_blocks)
        return self.weights_floor(candidate, gradients=False) + undivided_bytes(parts, blocks=blocks)

    def gathered_runs(self, candidate: Candidate) -> list[tuple[Candidate, int]]:
        """The arguments of the run by `run` from which `gathered_floor` follows; [] where no run serves."""
        rows, uneven = divmod(candidate.rows_on_rank(self.workload.rows), candidate.cp)
        if candidate.zero < 3 or candidate.pp > 1 or candidate.ep > 1 or uneven:
            return []
        count = min(candidate.microbatches, MEMORY_MICROBATCHES)
        run = replace(candidate, dp=2, cp=1, context=None, microbatches=count)
        return [(run, run.dp * rows)]

    def peak(self, candidate: Candidate) -> int:
        """An upper bound of the bytes of the candidate's fullest rank in a step.

        Of each stage, or in `_whole` of the first and the last, the rank at rank 0's place is predicted: this rank has
        the largest parts.
        """
        key = candidate, self.workload.rows
        if key not in self._peaks:
            self._peaks[key] = self._peak(candidate)
        return self._peaks[key]

    def _peak(self, candidate: Candidate) -> int:
        parts = self.parts.of(*self.run_for(candidate))
        if candidate.pp == 1:
            blocks = len(self.parameters.in_blocks)
            return self._whole(candidate) if parts is None else compose(parts, blocks=blocks).nbytes
        schedule = candidate.make_schedule()
        if parts is None or schedule is None or schedule.splits_backward:
            return self._whole(candidate)
        ranges = even_stages(len(self.parameters.in_blocks), schedule.num_stages)
        return max(each.nbytes for each in stage_peaks(parts, schedule, ranges))

    def run_for(self, candidate: Candidate) -> tuple[Candidate, int]:
        """The arguments of `run` for `peak`: a candidate of at most two stages, and the rows of a microbatch."""
        run = replace(candidate, microbatches=min(candidate.microbatches, MEMORY_MICROBATCHES))
        if run.pp > 1:
            run = replace(run, pp=2, schedule="1f1b", chunks=1, zero=2 if run.zero == 3 else run.zero)
        return run, self.workload.rows // candidate.microbatches

    def run(self, candidate: Candidate, rows: int) -> MemoryParts | None:
        """`memory_parts` of a step; None for a model without alike blocks.

        rows: of a microbatch, over all ranks. Raises ValueError for a candidate refused by the model.
        """
        return self._follow(partial(memory_parts, **self._options()), candidate, rows)

    def run_forward(self, candidate: Candidate, rows: int) -> SavedParts | None:
        """`saved_parts` of a step, which runs the forwards alone. As `run`."""
        return self._follow(saved_parts, candidate, rows)

    def _follow(self, find: Callable[..., T], candidate: Candidate, rows: int) -> T | None:
        """The result of `find` for the short model under a candidate; None for a model without alike blocks."""
        model = self._short_model()
        if model is None:
            return None
        mesh, plan = ProcessMesh.grid(**candidate.axes), self.workload.plan_of(candidate, rows)
        shape = self.workload.shape(rows * candidate.microbatches, candidate.microbatches)
        with self.workload.autocast():
            return find(model, mesh, plan, shape)

    def _short_model(self) -> nn.Module | None:
        """The model to compose memory from: of `SHORT` blocks where all are alike, to save time in copying.

        None for a model with too few alike blocks.
        """
        if not self._models:
            self._models.append(_shorten(self.workload))
        return self._models[0]

    def _whole(self, candidate: Candidate) -> int:
        """The peak bytes by `predict_memory`: the larger peak of rank 0 and of the last stage's first rank."""
        mesh, shape = ProcessMesh.grid(**candidate.axes), self.workload.shape(0, candidate.microbatches)
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


def _floor_run(candidate: Candidate, tp: int) -> Candidate:
    """The candidate to run for `PlanMemory.floor`: with the candidate's recompute and sequence, without "dp" and "cp".

    With stages if the candidate has stages.
    """
    stage: dict[str, Any] = {"pp": 2, "schedule": "1f1b", "microbatches": MEMORY_MICROBATCHES}
    options = stage if candidate.pp > 1 else {}
    return Candidate(**options, tp=tp, recompute=candidate.recompute, sequence=candidate.sequence and tp > 1)


def least_tp(sizes_of_tp: Iterable[int]) -> tuple[int, int]:
    """The two least sizes of tp above 1. With two or fewer: (1, LARGEST), so each size is run."""
    sizes = sorted({*sizes_of_tp} - {1})
    return (sizes[0], sizes[1]) if len(sizes) > 2 else (1, LARGEST)


def in_flight(candidate: Candidate) -> float:
    """The most microbatches whose activations rank 0 holds at once, as a mean over the rank's stages."""
    if candidate.schedule is None:
        return 1.0
    return bounds_of(candidate.schedule).in_flight(candidate.pp, candidate.microbatches, candidate.chunks)


def _shorten(workload: Workload) -> nn.Module | None:
    names = block_names(workload.model, workload.plan_of(Candidate()))
    signatures = [signature(workload.model.get_submodule(name), name) for name in names]
    if all(len(each.blocks) == 1 for each in choose_representatives(signatures, GATHERED_AHEAD)):
        return None
    if len(names) <= SHORT or len(set(signatures)) > 1:
        return workload.model
    return copy_blocks(workload.model, names, range(SHORT))
