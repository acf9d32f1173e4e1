"""`PlanPrices`: the price of each plan of a workload on a chip, and lower bounds of it that share traces."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .bounds import (
    DataWork,
    StageWork,
    data_work_of,
    floor_seconds,
    received_share,
    work_of,
)
from .chip import Chip
from .estimate import Estimate, estimate
from .events import Compute, Start, Trace
from .plan_memory import PlanMemory
from .plans import Candidate
from .price import fuse, seconds_of, transfer
from .search import Bound
from .trace import RUN_MICROBATCHES
from .workload import Workload, times_of

ROUNDING = 1 - 1e-9  # sums of seconds in another order than the price's must not be above it
STAGE: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}  # of a candidate whose trace is of a pipeline's stage
WEIGHTS, ACTIVATIONS, TIME = "memory of weights and states", "memory with activations", "time"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanPrices:
    """Prices and bounds of the plans of a workload on `processes` chips."""

    workload: Workload
    chip: Chip
    processes: int
    limit: int  # bytes that a rank may use
    flops: float  # of the model in a step, without recomputation
    memory: PlanMemory
    # For each context: the least sizes of tp and cp above 1 that the space has, whose traces stand for larger ones.
    least_sizes: dict[str | None, tuple[int, int]]
    _works: dict[tuple[Candidate, int, int], StageWork | None] = field(default_factory=dict)
    _data: dict[tuple[Candidate, int, int, int], DataWork | None] = field(default_factory=dict)
    _seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def bounds(self) -> list[Bound[Candidate]]:
        """The bounds of a search, cheap ones first."""
        return [
            Bound(WEIGHTS, self.weights_bound, is_eager=True),
            Bound(TIME, self.even_bound, is_eager=True),
            Bound(TIME, self.work_bound),
            Bound(ACTIVATIONS, self.activations_bound),
            Bound(TIME, self.stage_bound),
        ]

    # -- memory

    def weights_bound(self, candidate: Candidate) -> float:
        """math.inf where parameters, gradients and states alone exceed the memory; else 0."""
        return math.inf if self.memory.weights_floor(candidate) > self.limit else 0.0

    def activations_bound(self, candidate: Candidate) -> float:
        """math.inf where a lower bound of the memory with activations exceeds it; else 0."""
        try:
            return math.inf if self.memory.floor(candidate) > self.limit else 0.0
        except ValueError:  # refused by the model: reported by the price
            return 0.0

    def fits(self, candidate: Candidate) -> bool:
        """Whether the peak of a step is within the memory."""
        return self.memory.peak(candidate) <= self.limit

    # -- time

    def even_bound(self, candidate: Candidate) -> float:
        """Seconds if the work of one rank were divided evenly over all, and nothing communicated."""
        key = Candidate(**STAGE, recompute=candidate.recompute)
        work = self._floors(key, 1, 1)
        return self._of_stages(work, (key, 1, 1), candidate, self._share(candidate) / candidate.tp / candidate.cp)

    def work_bound(self, candidate: Candidate) -> float:
        """Seconds of the work at best speed with collectives over "tp" and "cp", and of what comes after backward."""
        tp, cp = candidate.tp, candidate.cp
        least_tp, least_cp = self.least_sizes.get(candidate.context, (1, 1))
        key = Candidate(
            **STAGE,
            tp=least_tp if tp > 1 else 1,
            cp=least_cp if cp > 1 else 1,
            context=candidate.context,
            sequence=candidate.sequence,
            recompute=candidate.recompute,
        )
        work = self._floors(key, tp, cp)
        seconds = self._of_stages(work, (key, tp, cp), candidate, self._share(candidate))
        data = self._data_floors(candidate)
        return seconds if data is None else max(data.busy, seconds + self._after(data, candidate))

    def stage_bound(self, candidate: Candidate) -> float:
        """Seconds by the price of a stage without collectives over the data axes, and of what comes after backward."""
        if candidate.ep > 1:
            return 0.0
        rows = candidate.rows_on_rank(self.workload.rows)
        key = Candidate(
            **STAGE,
            tp=candidate.tp,
            cp=candidate.cp,
            context=candidate.context,
            sequence=candidate.sequence,
            recompute=candidate.recompute,
        )
        work = self._prices(key, rows)
        data = self._data_floors(candidate)
        seconds = self._of_stages(work, (key, rows), candidate, 1.0)
        return seconds if data is None else max(data.busy, seconds + self._after(data, candidate))

    def price(self, candidate: Candidate) -> tuple[float, Estimate | None]:
        """The seconds of a step by the candidate, and their estimate; math.inf for a plan that the model refuses."""
        try:
            found = self.estimate(candidate)
        except ValueError:
            return math.inf, None
        return found.seconds, found

    def estimate(self, candidate: Candidate, *, keep_spans: bool = False) -> Estimate:
        """The estimate of a step by the candidate. Raises ValueError for a plan that the model refuses."""
        return estimate(
            self.workload.trace(candidate),
            chip=self.chip,
            mesh_sizes=candidate.axes,
            tokens=self.workload.rows * self.workload.tokens,
            flops=self.flops,
            schedule=candidate.make_schedule(),
            compiled=self.workload.is_compiled,
            dtype=str(self.workload.dtype).removeprefix("torch."),
            keep_spans=keep_spans,
        )

    # -- parts of bounds, each found once

    def _share(self, candidate: Candidate) -> float:
        """The share of the step's rows in a microbatch on a rank."""
        return candidate.rows_on_rank(self.workload.rows) / self.workload.rows

    def _of_stages(self, work: StageWork | None, key: tuple[Any, ...], candidate: Candidate, share: float) -> float:
        """`StageWork.seconds`, found once for all candidates with the same stages."""
        if work is None:
            return 0.0
        splits = candidate.schedule == "zero_bubble"
        known = (*key, candidate.pp, candidate.chunks, candidate.microbatches, splits, share)
        if known not in self._seconds:
            self._seconds[known] = ROUNDING * work.seconds(candidate, share)
        return self._seconds[known]

    def _after(self, data: DataWork, candidate: Candidate) -> float:
        return data.after_backward(candidate, len(self.memory.parameters.in_blocks))

    def _floors(self, key: Candidate, tp: int, cp: int) -> StageWork | None:
        """Floors of the whole step on a rank of tp x cp ranks, from the trace of `key` on fewer; None without one.

        Work and bytes are divided evenly by the further ranks; what a collective over "tp" or "cp" receives follows
        from the size of its group.
        """
        known = key, tp, cp
        if known not in self._works:
            trace = self._trace(key)
            further = tp * cp / (key.tp * key.cp)

            def seconds(start: Start) -> float:
                sizes = {("tp",): (key.tp, tp, 1, cp / key.cp), ("cp",): (key.cp, cp, tp, tp / key.tp)}
                if start.axes not in sizes:
                    return 0.0
                least, size, stride, divided = sizes[start.axes]
                nbytes = start.nbytes * received_share(start.kind, size) / received_share(start.kind, least) / divided
                return self._transfer(replace(start, size=size, stride=stride, nbytes=int(nbytes)))

            self._works[known] = (
                None
                if trace is None
                else work_of(trace, lambda compute: floor_seconds(compute, self.chip) / further, seconds)
            )
        return self._works[known]

    def _prices(self, key: Candidate, rows: int) -> StageWork | None:
        """The prices of a microbatch of `rows` rows on a stage with all blocks and without data axes."""
        known = key, rows, 0
        if known not in self._works:
            trace = self._trace(key, rows=rows)
            self._works[known] = (
                None
                if trace is None
                else work_of(trace, lambda each: seconds_of(each, self.chip), self._transfer, self._host)
            )
        return self._works[known]

    def _data_floors(self, candidate: Candidate) -> DataWork | None:
        """Floors of the data axes' collectives and of the update; None for experts on an axis of their own."""
        ranks, tp = candidate.data_ranks, candidate.tp
        if candidate.ep > 1:
            return None
        least = 2 if ranks > 1 else 1
        stage = STAGE if candidate.pp > 1 else {}
        count = 1 if stage else min(candidate.microbatches, RUN_MICROBATCHES)
        # one row, as many as microbatches: gradients and parameters do not depend on them
        key = Candidate(**stage, dp=least, zero=candidate.zero, microbatches=count)
        known = key, ranks, tp, 1 if stage else candidate.microbatches
        if known not in self._data:
            trace = self._trace(key, rows=least)

            def seconds(start: Start) -> float:
                if start.size <= 1 or "dp" not in start.axes:
                    return 0.0
                nbytes = start.nbytes * received_share(start.kind, ranks) / received_share(start.kind, least) / tp
                sent = replace(start, size=ranks, stride=tp, nbytes=int(nbytes))
                return self._transfer(sent) - self._transfer(replace(sent, nbytes=0))

            def update(compute: Compute) -> float:
                return floor_seconds(compute, self.chip) / tp * (least / ranks if candidate.zero else 1)

            if trace is not None:
                trace = trace if stage else replace(trace, times=times_of(candidate.microbatches))
            self._data[known] = None if trace is None else data_work_of(trace, update, seconds)
        return self._data[known]

    @property
    def _host(self) -> float:
        """Seconds of the host for an op."""
        return 0.0 if self.workload.is_compiled else self.chip.host_seconds

    def _transfer(self, start: Start) -> float:
        return transfer(replace(start, number=0, module=""), self.chip, world=self.processes).seconds

    def _trace(self, candidate: Candidate, rows: int | None = None) -> Trace | None:
        """The trace of a candidate with `rows` rows in a microbatch; None where the model refuses the candidate."""
        try:
            trace = self.workload.trace(candidate, rows)
        except ValueError:
            return None
        if not self.workload.is_compiled:
            return trace
        return replace(trace, segments=tuple(replace(each, events=tuple(fuse(each.events))) for each in trace.segments))


def least_sizes(candidates: Iterable[Candidate]) -> dict[str | None, tuple[int, int]]:
    """For each context, the least sizes of tp and cp above 1 of any candidate; 1 where none is above 1."""
    sizes = {(candidate.context, candidate.tp, candidate.cp) for candidate in candidates}
    return {
        context: (
            min((tp for each, tp, _ in sizes if each == context and tp > 1), default=1),
            min((cp for each, _, cp in sizes if each == context and cp > 1), default=1),
        )
        for context in {context for context, _, _ in sizes}
    }
