"""`DataFloors`: lower bounds of the collectives over the data axes, and of the optimizer's update.

Without "ep" from traces of two ranks along "dp"; with "ep" from the bytes of the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add

from .bounds import Parameters, floor_seconds
from .chip import Chip
from .data_work import WITHOUT_DATA, DataWork, data_work_of, received_share
from .events import Compute, Start
from .plans import Candidate
from .price import collective_seconds
from .stage_traces import STAGE, StageTraces
from .trace import RUN_MICROBATCHES, times_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataFloors:
    """Lower bounds for candidates with any number of ranks. Made with `PlanPrices`."""

    stages: StageTraces
    parameters: Parameters
    chip: Chip
    processes: int
    _found: dict[tuple[Candidate, int, int, int], DataWork | None] = field(default_factory=dict)
    _of_experts: dict[tuple[int, ...], DataWork] = field(default_factory=dict)  # by sizes and options

    def traced(self, candidate: Candidate) -> list[tuple[Candidate, int]]:
        """The candidate and the rows traced for `work`: two ranks along "dp" with a row each; [] where none is needed.

        The way of attention over "cp" does not matter here, nor does the number of microbatches from two on: each
        trace serves all.
        """
        if candidate.data_ranks == 1 or candidate.ep > 1:
            return []
        stage = STAGE if candidate.pp > 1 else {}
        count = 1 if stage or candidate.microbatches == 1 else RUN_MICROBATCHES
        key = Candidate(**stage, dp=2, tp=candidate.tp, zero=candidate.zero, microbatches=count)
        if _follows_cp(candidate):
            key = replace(key, cp=candidate.cp, context="all_gather" if candidate.cp > 1 else None)
        return [(self.stages.workload.traced(key), key.dp)]

    def work(self, candidate: Candidate) -> DataWork | None:
        """Lower bounds of the data axes' collectives and of the update; None for a refused plan.

        0 for a single rank of the data axes.
        With "ep", see `of_experts`. Else from the trace of two ranks along "dp" with a row each. With more ranks, a
        rank receives a larger share, in as many collectives or more. Gradients of whole parameters that are summed over
        "cp" may take different routes than in this trace: then the latency of ranks along "dp" alone counts.
        """
        if candidate.ep > 1:
            return self.of_experts(candidate)
        ranks, tp = candidate.data_ranks, candidate.tp
        traced = self.traced(candidate)
        if not traced:
            return WITHOUT_DATA
        (key, rows), follows_cp = traced[0], _follows_cp(candidate)
        transfer = partial(collective_seconds, chip=self.chip, world=self.processes)
        known = key, candidate.dp, candidate.cp, candidate.microbatches
        if known not in self._found:
            trace = self.stages.fused(key, rows)

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
                    return transfer(sent)
                latency = transfer(replace(sent, size=candidate.dp, stride=candidate.cp * tp, nbytes=0))
                return transfer(sent) - transfer(replace(sent, nbytes=0)) + latency

            def update(compute: Compute) -> float:
                return floor_seconds(compute, self.chip) * (key.data_ranks / ranks if candidate.zero else 1)

            if trace is not None and candidate.pp == 1:
                # Two microbatches are the first and the last of three.
                trace = replace(
                    trace, times=(1, 0, 1) if candidate.microbatches == 2 else times_of(candidate.microbatches)
                )
            gathers_always = candidate.zero == 3 and candidate.pp == 1
            self._found[known] = (
                None if trace is None else data_work_of(trace, update, seconds, gathers_always=gathers_always)
            )
        return self._found[known]

    def of_experts(self, candidate: Candidate) -> DataWork:
        """`work` with "ep": the bytes of gathers and of sums of gradients at full bandwidth, without the update.

        Experts are summed over fewer ranks than all other parameters, by collectives beside theirs: the slower count.
        0 where some parameters are not trained.
        """
        sizes = candidate.pp, candidate.data_ranks, candidate.tp, candidate.ep, candidate.over_tp
        known = *sizes, candidate.zero, candidate.microbatches
        if known not in self._of_experts:
            self._of_experts[known] = self._work_of_experts(candidate)
        return self._of_experts[known]

    def _work_of_experts(self, candidate: Candidate) -> DataWork:
        parameters, workload, ranks = self.parameters, self.stages.workload, candidate.data_ranks
        if parameters.trained < parameters.total or not parameters.in_blocks:
            return WITHOUT_DATA
        folded = candidate.ep * (1 if candidate.over_tp else candidate.tp)
        experts = [nbytes / folded for nbytes in parameters.experts_in_blocks]
        shared_parameters = [
            (nbytes - expert_bytes) / candidate.tp
            for nbytes, expert_bytes in zip(parameters.in_blocks, parameters.experts_in_blocks, strict=True)
        ]
        gather_share = min(1.0, workload.dtype.itemsize / parameters.itemsize)
        summed = parameters.itemsize if workload.reduce_dtype is None else workload.reduce_dtype.itemsize
        sum_share = min(1.0, summed / parameters.itemsize)
        is_whole, zero, microbatches = candidate.pp == 1, candidate.zero, candidate.microbatches
        gathers_always = zero == 3 and is_whole
        floors = []
        for blocks, size, stride in (
            (shared_parameters, ranks, candidate.tp),
            (experts, ranks * candidate.tp // folded, 1),  # no other distance is faster
        ):
            sums = [self._scattered(nbytes * sum_share, size, stride) for nbytes in blocks]
            gathers = [self._scattered(nbytes * gather_share, size, stride) if zero else 0.0 for nbytes in blocks]
            backward = sums if zero > 1 or (is_whole and microbatches == 1) else [0.0] * len(blocks)
            if gathers_always:
                backward = list(map(add, sums, gathers))
            floors.append(
                DataWork(
                    gathers=min(gathers),
                    in_backward=min(backward),
                    gradients=0.0 if is_whole or zero > 1 else min(sums),
                    update=0.0,
                    busy=(microbatches if zero > 1 else 1) * sum(sums)
                    + (2 * microbatches if gathers_always else 1) * sum(gathers),
                    at_last=sum(sums) if is_whole else 0.0,
                    of_forward=max(0.0, sum(gathers) - 2 * max(gathers)) if gathers_always else 0.0,
                    of_backward=max(0.0, sum(backward) - 2 * max(backward)),
                    under_way=2 * max(backward),
                )
            )
        return max(floors, key=lambda each: each.busy)

    def _scattered(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds without latency to reduce and scatter, or to gather, a tensor of `nbytes` over `size` ranks."""
        if size <= 1:
            return 0.0
        sent = Start(
            number=0, kind="reduce-scatter", axes=("dp",), group="", size=size, stride=stride,
            nbytes=int(nbytes * received_share("reduce-scatter", size)),
        )  # fmt: skip
        transfer = partial(collective_seconds, chip=self.chip, world=self.processes)
        return transfer(sent) - transfer(replace(sent, nbytes=0))


def _follows_cp(candidate: Candidate) -> bool:
    """Whether the trace has the candidate's axis "cp"."""
    return candidate.zero > 1 and candidate.dp > 1
