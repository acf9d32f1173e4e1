"""`PlanPrices`: the price of each plan of a workload on a chip, and lower bounds of prices. Plans share traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..plan_options import Recompute
from .bounds import (
    StageWork,
    floor_seconds,
    layers_of_stages,
    work_of,
)
from .chip import Chip
from .data_floors import DataFloors
from .data_work import WITHOUT_DATA, DataWork
from .estimate import Estimate, estimate
from .events import Start
from .pipeline_flow import flow_floor
from .plan_memory import PlanMemory
from .plan_runs import PlanRun, unmade
from .plans import Candidate, reason_of
from .price import collective_seconds, seconds_of
from .search import Bound
from .stage_traces import STAGE, StageTraces, folded
from .trace import RUN_MICROBATCHES
from .workload import Workload

ROUNDING = 1 - 1e-9  # on bounds: added up in a different order than prices, sums must not be above the price
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
    stages: StageTraces
    data: DataFloors = field(init=False)
    # Results found before, by the arguments:
    _least_works: dict[tuple[Candidate, int, int, float], StageWork | None] = field(default_factory=dict)
    _works: dict[tuple[Candidate, int], StageWork | None] = field(default_factory=dict)
    _seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data = DataFloors(
            stages=self.stages, parameters=self.memory.parameters, chip=self.chip, processes=self.processes
        )
        object.__setattr__(self, "data", data)  # the dataclass is frozen

    def bounds(self) -> list[Bound[Candidate]]:
        """The bounds for `search`, from cheap to costly."""
        return [
            Bound(WEIGHTS, self.weights_bound, is_eager=True),
            Bound(TIME, self.eager_bound, is_eager=True),
            Bound(TIME, self.experts_bound, runs=self.experts_runs),
            Bound(ACTIVATIONS, self.activations_bound, runs=self.floor_runs),
            Bound(TIME, self.data_bound, runs=self._data_runs),
            Bound(TIME, self.shared_bound, runs=lambda each: self._data_runs(each) + self._stage_runs(_shared(each))),
            Bound(TIME, self.stage_bound, runs=lambda each: self._data_runs(each) + self._stage_runs(each)),
            Bound(TIME, self.flow_bound, runs=lambda each: self._data_runs(each) + self._stage_runs(each)),
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

    def even_bound(self, candidate: Candidate, data: DataWork = WITHOUT_DATA) -> float:
        """Seconds if the ranks divided all work evenly, at the best rates, with the collectives of `data` alone."""
        key = _even_stage(candidate.recompute)
        share = candidate.rows_on_rank(self.workload.rows) / self.workload.rows
        work = self._floors(key, self.workload.rows)
        return self._of_stages(work, (key,), candidate, share / candidate.tp / candidate.cp, data=data)

    def eager_bound(self, candidate: Candidate) -> float:
        """`even_bound`; with "ep", `data_bound` by `even_bound`, which needs no trace of its own."""
        if candidate.ep == 1:
            return self.even_bound(candidate)
        data = self.data.of_experts(candidate)
        return self._with_passes(data, candidate, self.even_bound(candidate, data))

    def experts_bound(self, candidate: Candidate, data: DataWork = WITHOUT_DATA) -> float:
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
        return self._of_stages(work, (key, rows, stride), candidate, share / candidate.tp / candidate.cp, data=data)

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
        """Seconds of `even_bound` or `experts_bound`, of collectives over the data axes, and of the update."""
        data = self.data.work(candidate)
        if data is None:
            return 0.0
        passes = max(self.even_bound(candidate, data), self.experts_bound(candidate, data))
        return self._with_passes(data, candidate, passes)

    def shared_bound(self, candidate: Candidate) -> float:
        """`stage_bound` without recomputation: candidates that compute activations again share a trace."""
        return self.stage_bound(_shared(candidate))

    def stage_bound(self, candidate: Candidate) -> float:
        """Seconds of a stage's work at the prices, of collectives over the data axes, and of the update."""
        data = self.data.work(candidate)
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
        seconds = self._of_stages(work, (key, rows), candidate, 1.0, nbytes=nbytes, data=data)
        last = work.later if candidate.microbatches > 1 else work.first
        return self._with_passes(data, candidate, seconds, max(last[-1].backward, last[-1].host_backward))

    def flow_bound(self, candidate: Candidate) -> float:
        """Seconds of a pipeline's actions in the order of the schedule, each as in `stage_bound`; 0 without stages."""
        data, own, schedule = self.data.work(candidate), self._own_stage(candidate), candidate.make_schedule()
        if data is None or own is None or schedule is None or schedule.splits_backward:
            return 0.0
        work = self._prices(*own)
        if work is None:
            return 0.0
        layers = layers_of_stages(len(self.memory.parameters.in_blocks), schedule.num_stages)

        def of_ranks(of_block: float, outer: tuple[float, float]) -> list[float]:
            """A rank has the model's part before the blocks with the first stage, the part after with the last."""
            found = [of_block * sum(layers[stage] for stage in stages) for stages in schedule.stages]
            found[0] += outer[0]
            found[-1] += outer[1]
            return found

        passes = flow_floor(
            schedule,
            work.of_stages(candidate, data=data),
            message=self._message(candidate, self.stages.trace(*own).message_bytes),
            begins=of_ranks(data.gathers, data.outer_gathers),
            gradients=of_ranks(data.gradients, data.outer_gradients),
        )
        return ROUNDING * (passes + data.update / candidate.pp)

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
        return unmade((self.memory.saved, *each) for each in self.memory.floor_runs(candidate))

    def _gathered_runs(self, candidate: Candidate) -> list[PlanRun]:
        return unmade((self.memory.parts, *each) for each in self.memory.gathered_runs(candidate))

    def _data_runs(self, candidate: Candidate) -> list[PlanRun]:
        own = [run for each in self.data.traced(candidate) for run in self._stage_traces(*each)]
        return own + self.experts_runs(candidate)

    def _stage_runs(self, candidate: Candidate) -> list[PlanRun]:
        own = self._own_stage(candidate)
        return [] if own is None else self._stage_traces(*own)

    def _stage_traces(self, candidate: Candidate, rows: int) -> list[PlanRun]:
        return unmade((self.stages.known, *each) for each in self.stages.runs(candidate, rows))

    def price_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `price`."""
        return unmade([(self.workload.runs, *self.workload.run_for(candidate))])

    def peak_runs(self, candidate: Candidate) -> list[PlanRun]:
        """For `PlanMemory.peak`."""
        return unmade([(self.memory.parts, *self.memory.run_for(candidate))])

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

    def _of_stages(
        self,
        work: StageWork | None,
        key: tuple[Any, ...],
        candidate: Candidate,
        share: float,
        *,
        nbytes: int = 0,
        data: DataWork = WITHOUT_DATA,
    ) -> float:
        """`StageWork.seconds`, computed once for candidates with equal `key`, stages, share and data; 0 without work.

        nbytes: of a message between stages.
        """
        if work is None:
            return 0.0
        of_schedule = candidate.pp, candidate.chunks, candidate.microbatches, candidate.splits_backward
        known = (*key, *of_schedule, share, data)
        if known not in self._seconds:
            message = self._message(candidate, nbytes)
            self._seconds[known] = ROUNDING * work.seconds(candidate, share, message=message, data=data)
        return self._seconds[known]

    def _message(self, candidate: Candidate, nbytes: int) -> float:
        """Seconds of a message of `nbytes` between stages; 0 without bytes."""
        stride = candidate.processes // candidate.pp
        sent = Start(number=0, kind="recv", axes=("pp",), group="", size=2, stride=stride, nbytes=nbytes)
        return self._transfer(sent) if nbytes else 0.0

    def _floors(self, key: Candidate, rows: int, stride: int = 1, slower: float = 1.0) -> StageWork | None:
        """Lower bounds of the work of a microbatch, and of the moves of tokens over "ep"; None if refused.

        rows: of the trace of `key`. stride: of the candidate's "ep". slower: seconds of moves are counted this often.
        """
        known = key, rows, stride, slower
        if known not in self._least_works:
            trace = self.stages.fused(key, rows)

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
            trace = self.stages.fused(key, rows)
            price = partial(seconds_of, chip=self.chip)

            def seconds(start: Start) -> float:
                return 0.0 if "dp" in start.axes else self._transfer(start)

            self._works[key, rows] = None if trace is None else work_of(trace, price, seconds, self._host)
        return self._works[key, rows]

    @property
    def _host(self) -> float:
        """Seconds of the host for an op; 0 for compiled blocks."""
        return 0.0 if self.workload.is_compiled else self.chip.host_seconds

    def _transfer(self, start: Start) -> float:
        return collective_seconds(start, self.chip, world=self.processes)


def _shared(candidate: Candidate) -> Candidate:
    """The candidate without recomputation, which computes no more."""
    return replace(candidate, recompute="none")


def _even_stage(recompute: Recompute, ep: int = 1) -> Candidate:
    """The candidate traced for `even_bound`, and with "ep" for `experts_bound`."""
    return Candidate(**STAGE, dp=ep, ep=ep, recompute=recompute)


def _stage_of(candidate: Candidate) -> Candidate:
    """The candidate of a stage without data axes beyond "ep", whose trace all candidates with these options share."""
    stage = Candidate(
        **STAGE,
        tp=candidate.tp,
        cp=candidate.cp,
        ep=candidate.ep,
        over_tp=candidate.over_tp,
        context=candidate.context,
        sequence=candidate.sequence,
        recompute=candidate.recompute,
    )
    return folded(stage)
