"""`PlanPrices`: the price of each plan of a workload on a chip, and lower bounds of prices. Plans share traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..plan_options import Recompute
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
from .plan_runs import PlanRun, unmade
from .plans import Candidate, reason_of
from .price import fuse, seconds_of, transfer
from .search import Bound
from .stage_traces import StageTraces
from .trace import RUN_MICROBATCHES, times_of
from .workload import Workload

ROUNDING = 1 - 1e-9  # on bounds: added up in a different order than prices, sums must not be above the price
STAGE: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}  # fields of candidates whose trace is of a stage with all blocks
WITHOUT_DATA = DataWork(gathers=0.0, in_backward=0.0, gradients=0.0, update=0.0, busy=0.0, at_last=0.0)
WEIGHTS, ACTIVATIONS, TIME = "memory of weights and states", "memory with activations", "time"  # names of bounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanPrices:
    """Prices of a workload's plans on `processes` chips, and lower bounds of prices. Made by `search_plans`.

    Lower bounds of larger sizes of dp, cp and tp come from traces of the least sizes, with the work divided further.
    """

    workload: Workload
    chip: Chip
    processes: int
    limit: int  # bytes that a rank may use
    flops: float  # of the model in a step, without recomputation
    memory: PlanMemory
    stages: StageTraces  # traces of stages without data axes
    # Results found before, by the arguments:
    _least_works: dict[tuple[Candidate, int, int, float], StageWork | None] = field(default_factory=dict)
    _works: dict[tuple[Candidate, int], StageWork | None] = field(default_factory=dict)
    _data: dict[tuple[Candidate, int, int, int], DataWork | None] = field(default_factory=dict)
    _seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def bounds(self) -> list[Bound[Candidate]]:
        """The bounds for `search`, from cheap to costly."""
        return [
            Bound(WEIGHTS, self.weights_bound, is_eager=True),
            Bound(TIME, self.even_bound, is_eager=True),
            Bound(TIME, self.experts_bound, runs=self.experts_runs),
            Bound(ACTIVATIONS, self.activations_bound, runs=self.floor_runs),
            Bound(TIME, self.data_bound, runs=self._data_runs),
            Bound(TIME, self.stage_bound, runs=lambda each: self._data_runs(each) + self._stage_runs(each)),
            Bound(ACTIVATIONS, self.gathered_bound, runs=self._gathered_runs),
        ]

    # -- memory

    def weights_bound(self, candidate: Candidate) -> float:
        """math.inf where parameters, gradients and states alone exceed the memory; else 0."""
        return math.inf if self.memory.weights_floor(candidate) > self.limit else 0.0

    def activations_bound(self, candidate: Candidate) -> float:
        """math.inf where a lower bound of the bytes with activations exceeds the memory; else 0."""
        return self._memory_bound(self.memory.floor, candidate)

    def gathered_bound(self, candidate: Candidate) -> float:
        """math.inf where a lower bound of the bytes with gathered parameters exceeds the memory; else 0."""
        return self._memory_bound(self.memory.gathered_floor, candidate)

    def _memory_bound(self, floor: Callable[[Candidate], float], candidate: Candidate) -> float:
        try:
            return math.inf if floor(candidate) > self.limit else 0.0
        except ValueError:  # refused by the model: reported by the price
            return 0.0

    def fits(self, candidate: Candidate) -> bool:
        """Whether the peak of a step is within `limit`."""
        return self.memory.known_floor(candidate) <= self.limit and self.memory.peak(candidate) <= self.limit

    # -- time

    def even_bound(self, candidate: Candidate) -> float:
        """Seconds if the ranks divided all work evenly and without communication, at the best rates."""
        key = _even_stage(candidate.recompute)
        share = candidate.rows_on_rank(self.workload.rows) / self.workload.rows
        work = self._floors(key, self.workload.rows)
        return self._of_stages(work, (key,), candidate, share / candidate.tp / candidate.cp)

    def experts_bound(self, candidate: Candidate) -> float:
        """`even_bound` with the moves of tokens over "ep", and the work on received tokens; 0 without "ep".

        A trace with the candidate's "ep" serves all further sizes. Moves take as long as over the candidate's links,
        without latency.
        """
        found = self._experts_stage(candidate)
        if found is None:
            return 0.0
        key, rows = found
        share = candidate.least_rows(self.workload.rows) / (rows // key.dp)
        tokens_divided, stride = (candidate.tp, 1) if candidate.over_tp else (1, candidate.tp)
        work = self._floors(key, rows, stride, candidate.tp / tokens_divided)
        return self._of_stages(work, (key, rows, stride), candidate, share / candidate.tp / candidate.cp)

    def _experts_stage(self, candidate: Candidate) -> tuple[Candidate, int] | None:
        """The candidate and the rows traced for `experts_bound`: the most whose tokens move as the candidate's do.

        None without "ep", where ranks have no rows, and where "cp" or "tp" do not divide the tokens of a row, or
        experts do not.
        """
        least, tokens = candidate.least_rows(self.workload.rows), self.workload.tokens
        even = 2 * candidate.cp * candidate.tp, max(1, self.stages.num_experts)
        if candidate.ep == 1 or not least or any(tokens % each for each in even):
            return None
        key = _even_stage(candidate.recompute, candidate.ep)
        way = self.stages.way(candidate, self.workload.rows // candidate.microbatches)
        rows, divided = self.workload.rows, candidate.cp * (candidate.tp if candidate.over_tp else 1)
        while rows and self.stages.way(key, rows * key.dp) != way:
            rows //= 2
        return (key, rows * key.dp) if rows * divided >= least else None  # of fewer, no share is a lower bound

    def data_bound(self, candidate: Candidate) -> float:
        """Seconds of `even_bound`, of collectives over the data axes, and of the update."""
        data = self._data_floors(candidate)
        if data is None:
            return 0.0
        return self._with_passes(data, candidate, self.even_bound(candidate))

    def stage_bound(self, candidate: Candidate) -> float:
        """Seconds of a stage's work at the prices, of collectives over the data axes, and of the update."""
        data = self._data_floors(candidate)
        if data is None:
            return 0.0
        own = self._own_stage(candidate)
        if own is None:
            return 0.0
        key, rows = own
        work = self._prices(key, rows)
        if work is None:
            return 0.0
        nbytes = self.stages.trace(key, rows).message_bytes
        seconds = self._of_stages(work, (key, rows), candidate, 1.0, nbytes=nbytes, sums=data.in_backward)
        last = work.later if candidate.microbatches > 1 else work.first
        return self._with_passes(data, candidate, seconds, max(last[-1].backward, last[-1].host_backward))

    def _with_passes(
        self, data: DataWork, candidate: Candidate, passes: float, last_backward: float | None = None
    ) -> float:
        blocks = len(self.memory.parameters.in_blocks)
        without_host = self._host == 0.0
        return ROUNDING * data.with_passes(candidate, blocks, passes, last_backward, gathers_first=without_host)

    def price(self, candidate: Candidate) -> tuple[float, Estimate | str]:
        """The seconds of a step, and the `Estimate`; math.inf and the reason if the model refuses the plan."""
        try:
            found = self.estimate(candidate)
        except ValueError as error:
            return math.inf, reason_of(error)
        return found.seconds, found

    def estimate(self, candidate: Candidate, *, keep_spans: bool = False) -> Estimate:
        """The `Estimate` of the candidate's step. Raises ValueError for a plan that the model refuses.

        keep_spans: as for `estimate`.
        """
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

    # -- the runs on shapes that are still to be made

    def even_runs(self, recomputes: Iterable[Recompute]) -> list[PlanRun]:
        """For `even_bound` of candidates with these values of recompute."""
        return [run for each in recomputes for run in self._stage_traces(_even_stage(each), self.workload.rows)]

    def experts_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `experts_bound`."""
        found = self._experts_stage(candidate)
        return [] if found is None else self._stage_traces(*found)

    def floor_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `activations_bound`."""
        return unmade((self.memory, *each) for each in self.memory.floor_runs(candidate))

    def _gathered_runs(self, candidate: Candidate) -> list[PlanRun]:
        return unmade((self.memory, *each) for each in self.memory.gathered_runs(candidate))

    def _data_runs(self, candidate: Candidate) -> list[PlanRun]:
        return [] if candidate.ep > 1 else self._stage_traces(*self._with_data(candidate))

    def _stage_runs(self, candidate: Candidate) -> list[PlanRun]:
        own = self._own_stage(candidate)
        return [] if own is None else self._stage_traces(*own)

    def _stage_traces(self, candidate: Candidate, rows: int) -> list[PlanRun]:
        return unmade((self.workload, *each) for each in self.stages.runs(candidate, rows))

    def price_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `price`."""
        return unmade([(self.workload, *self.workload.run_for(candidate))])

    def peak_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `PlanMemory.peak`."""
        return unmade([(self.memory, *self.memory.run_for(candidate))])

    def fit_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `fits`."""
        return [] if self.memory.known_floor(candidate) > self.limit else self.peak_runs(candidate)

    # -- parts of bounds, each found once

    def _own_stage(self, candidate: Candidate) -> tuple[Candidate, int] | None:
        """The candidate and the rows traced for `stage_bound`; None where ranks along "ep" have different rows.

        With "ep", as few ranks along "dp" as the axis "ep" takes, with as many rows each as the candidate's ranks.
        """
        key = replace(_stage_of(candidate), microbatches=RUN_MICROBATCHES)
        rows = candidate.rows_on_rank(self.workload.rows)
        if candidate.ep > 1 and rows * candidate.microbatches * candidate.dp != self.workload.rows:
            return None
        return key, rows * key.dp

    def _with_data(self, candidate: Candidate) -> tuple[Candidate, int]:
        """The candidate and the rows traced for `data_bound`: two ranks along "dp" with a row each.

        The way of attention over "cp" does not matter here, nor does the number of microbatches from two on: each
        trace serves all.
        """
        stage = STAGE if candidate.pp > 1 else {}
        count = 1 if stage or candidate.microbatches == 1 else RUN_MICROBATCHES
        key = Candidate(**stage, tp=candidate.tp, zero=candidate.zero, microbatches=count)
        if _follows_cp(candidate):
            key = replace(key, dp=2, cp=candidate.cp, context="all_gather" if candidate.cp > 1 else None)
        elif candidate.data_ranks > 1:
            key = replace(key, dp=2)
        return self.workload.traced(key), key.dp

    def _of_stages(
        self,
        work: StageWork | None,
        key: tuple[Any, ...],
        candidate: Candidate,
        share: float,
        *,
        nbytes: int = 0,
        sums: float = 0.0,
    ) -> float:
        """`StageWork.seconds`, computed once for candidates with equal `key`, stages, share and sums; 0 without work.

        nbytes: of a message between stages.
        """
        if work is None:
            return 0.0
        splits = candidate.schedule == "zero_bubble"
        known = (*key, candidate.pp, candidate.chunks, candidate.microbatches, splits, share, sums)
        if known not in self._seconds:
            stride = candidate.processes // candidate.pp
            sent = Start(number=0, kind="recv", axes=("pp",), group="", size=2, stride=stride, nbytes=nbytes)
            message = self._transfer(sent) if nbytes else 0.0
            self._seconds[known] = ROUNDING * work.seconds(candidate, share, message=message, sums=sums)
        return self._seconds[known]

    def _floors(self, key: Candidate, rows: int, stride: int = 1, slower: float = 1.0) -> StageWork | None:
        """Lower bounds of the work of a microbatch, and of the moves of tokens over "ep"; None if refused.

        rows: of the trace of `key`. stride: of the candidate's "ep". slower: seconds of moves are counted this often.
        """
        known = key, rows, stride, slower
        if known not in self._least_works:
            trace = self._trace(key, rows)

            def moves(start: Start) -> float:
                if start.axes != ("ep",):
                    return 0.0
                sent = replace(start, stride=stride)
                return slower * (self._transfer(sent) - self._transfer(replace(sent, nbytes=0)))

            floor = partial(floor_seconds, chip=self.chip)
            self._least_works[known] = None if trace is None else work_of(trace, floor, moves)
        return self._least_works[known]

    def _prices(self, key: Candidate, rows: int) -> StageWork | None:
        """Prices of a microbatch on a stage with all blocks, without collectives over "dp"; None if refused.

        rows: of a microbatch, over all ranks.
        """
        if (key, rows) not in self._works:
            trace = self._trace(key, rows)
            price = partial(seconds_of, chip=self.chip)

            def seconds(start: Start) -> float:
                return 0.0 if "dp" in start.axes else self._transfer(start)

            self._works[key, rows] = None if trace is None else work_of(trace, price, seconds, self._host)
        return self._works[key, rows]

    def _data_floors(self, candidate: Candidate) -> DataWork | None:
        """Lower bounds of the data axes' collectives and of the update; 0 with "ep", and None for a refused plan.

        From the trace of two ranks along "dp" with a row each. With more ranks, a rank receives a larger share, in as
        many collectives or more. Gradients of whole parameters that are summed over "cp" may take different routes than
        in this trace: then the latency of ranks along "dp" alone counts.
        """
        ranks, tp = candidate.data_ranks, candidate.tp
        if candidate.ep > 1:
            return WITHOUT_DATA
        (key, rows), follows_cp = self._with_data(candidate), _follows_cp(candidate)
        known = key, candidate.dp, candidate.cp, candidate.microbatches
        if known not in self._data:
            trace = self._trace(key, rows)

            def seconds(start: Start) -> float:
                axes = [axis for axis in start.axes if axis in ("dp", "cp")]
                if start.size <= 1 or not axes or (not follows_cp and axes != ["dp"]):
                    return 0.0
                least = math.prod(getattr(key, axis) for axis in axes)
                size = math.prod(getattr(candidate, axis) for axis in axes) if follows_cp else ranks
                nbytes = start.nbytes * received_share(start.kind, size) / received_share(start.kind, least)
                stride = start.stride if follows_cp else tp  # "dp" is outermost: no distance depends on its size
                sent = replace(start, size=size, stride=stride, nbytes=int(nbytes))
                if follows_cp:
                    return self._transfer(sent)
                latency = self._transfer(replace(sent, size=candidate.dp, stride=candidate.cp * tp, nbytes=0))
                return self._transfer(sent) - self._transfer(replace(sent, nbytes=0)) + latency

            def update(compute: Compute) -> float:
                return floor_seconds(compute, self.chip) * (key.data_ranks / ranks if candidate.zero else 1)

            if trace is not None and candidate.pp == 1:
                # Two microbatches are the first and the last of three.
                trace = replace(
                    trace, times=(1, 0, 1) if candidate.microbatches == 2 else times_of(candidate.microbatches)
                )
            self._data[known] = None if trace is None else data_work_of(trace, update, seconds)
        return self._data[known]

    @property
    def _host(self) -> float:
        """Seconds of the host for an op; 0 for compiled blocks."""
        return 0.0 if self.workload.is_compiled else self.chip.host_seconds

    def _transfer(self, start: Start) -> float:
        return transfer(replace(start, number=0, module=""), self.chip, world=self.processes).seconds

    def _trace(self, candidate: Candidate, rows: int) -> Trace | None:
        """`StageTraces.trace` as its events run; None where the model refuses the candidate."""
        try:
            trace = self.stages.trace(candidate, rows)
        except ValueError:
            return None
        if not self.workload.is_compiled:
            return trace
        return replace(trace, segments=tuple(replace(each, events=tuple(fuse(each.events))) for each in trace.segments))


def _even_stage(recompute: Recompute, ep: int = 1) -> Candidate:
    """The candidate traced for `even_bound`, and with "ep" for `experts_bound`."""
    return Candidate(**STAGE, dp=ep, ep=ep, recompute=recompute)


def _follows_cp(candidate: Candidate) -> bool:
    """Whether the trace for `data_bound` has the candidate's axis "cp"."""
    return candidate.zero > 1 and candidate.dp > 1


def _stage_of(candidate: Candidate) -> Candidate:
    """The candidate of a stage without data axes beyond "ep", whose trace all candidates with these options share."""
    folded = candidate.cp * (candidate.tp if candidate.over_tp else 1)
    return Candidate(
        **STAGE,
        dp=candidate.ep // math.gcd(candidate.ep, folded),
        tp=candidate.tp,
        cp=candidate.cp,
        ep=candidate.ep,
        over_tp=candidate.over_tp,
        context=candidate.context,
        sequence=candidate.sequence,
        recompute=candidate.recompute,
    )
