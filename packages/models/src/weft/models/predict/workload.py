"""`Workload`: a training step to plan, and the step's traces under candidates. Candidates share traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from weft.mesh import ProcessMesh

from ..experts import MixtureOfExperts
from ..parallel.experts.transport import LINKS, price_of, tokens_on_rank
from ..parallel.parallelize import own_plan
from ..parallel.plan import ParallelPlan
from ..plan_options import Zero
from ..schedules.pipeline_plan import PipelinePlan
from ..step.criterion import Criterion
from ..step.record import StepShape
from .events import Trace
from .plan_runs import KnownRuns
from .plans import Candidate
from .trace import RUN_MICROBATCHES, Reduced, merge_sums, reduce_model, times_of, trace_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A training step of a model on a batch, without a mesh and a plan. Further fields: as for `record`."""

    model: nn.Module  # on any device, not parallel; never changed
    rows: int  # of a step, over all ranks
    tokens: int  # of a row
    dtype: torch.dtype = torch.float32  # of the layers' computation, by autocast
    reduce_dtype: torch.dtype | None = None
    criterion: Criterion | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    update: Callable[[nn.Module], None] | None = None
    states: int | Mapping[str, int] = 2  # the optimizer's tensors for each element of a parameter
    is_compiled: bool = False  # whether blocks are compiled
    plan: ParallelPlan | None = None  # to which candidates' options are added; None: the model's own
    _plan: list[ParallelPlan] = field(default_factory=list)  # of `plan`, once known
    _reduced: dict[tuple[bool, bool], Reduced] = field(default_factory=dict)  # by whether with ZeRO, and with "pp"
    runs: KnownRuns[Trace] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", KnownRuns(self.run))  # the dataclass is frozen

    def plan_of(self, candidate: Candidate, rows: int | None = None) -> ParallelPlan:
        """The `ParallelPlan` of a candidate, with the cheaper way of tokens to experts. rows: as for `trace`."""
        if not self._plan:
            self._plan.append(own_plan(self.model) if self.plan is None else self.plan)
        plan = candidate.parallel_plan(self._plan[0])
        if plan.experts is None or plan.experts.tokens is not None:
            return plan
        mixture = next((each for each in self.model.modules() if isinstance(each, MixtureOfExperts)), None)
        if mixture is None:
            return plan
        rows = rows or self.rows // candidate.microbatches
        mesh = ProcessMesh.grid(**candidate.axes)
        num_experts, hidden_size = mixture.gate.weight.shape
        price = price_of(
            size=candidate.ep,
            tokens=tokens_on_rank(mesh, plan.experts, rows, self.tokens),
            hidden_size=hidden_size,
            num_experts=num_experts,
            experts_per_token=mixture.options.experts_per_token,
            itemsize=self.dtype.itemsize,
            link=LINKS["cuda"],
        )
        return replace(plan, experts=replace(plan.experts, tokens=price.cheaper))

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the model is called, for `dtype`."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast("cpu", dtype=self.dtype)

    def shape(self, rows: int, microbatches: int) -> StepShape:
        """The arguments of a run on shapes. rows: of the step, over all ranks and microbatches."""
        return StepShape(
            batch=(rows, self.tokens),
            criterion=self.criterion,
            inputs=self.inputs,
            microbatches=microbatches,
            reduce_dtype=self.reduce_dtype,
        )

    def trace(self, candidate: Candidate, rows: int | None = None) -> Trace:
        """The trace of rank 0, which has the most rows, in the candidate's step.

        rows: of a microbatch, over all ranks; None: the workload's rows over the candidate's microbatches.
        A trace is made once: a stage's serves every number of stages, every schedule, and every number of
        microbatches from `RUN_MICROBATCHES` on. Raises ValueError each time where the model refuses the candidate.
        """
        return self.in_buckets(self.sums(candidate, rows))

    def sums(self, candidate: Candidate, rows: int | None = None) -> Trace:
        """`trace` with a sum for each gradient, before `in_buckets`."""
        found = self.runs.of(*self.run_for(candidate, rows))
        return replace(found, times=times_of(candidate.microbatches))

    def in_buckets(self, trace: Trace) -> Trace:
        """A trace of `sums` with the sums in buckets, as a step sends them."""
        return merge_sums(trace, self.shape(1, 1).bucket_bytes)

    def run_for(self, candidate: Candidate, rows: int | None = None) -> tuple[Candidate, int]:
        """The arguments of `run` for `trace`."""
        return self.traced(candidate), rows or self.rows // candidate.microbatches

    def traced(self, candidate: Candidate) -> Candidate:
        """The simplest candidate with the same segments."""
        count = min(candidate.microbatches, RUN_MICROBATCHES)
        if candidate.pp == 1:
            return replace(candidate, microbatches=count)
        zero: Zero = 2 if candidate.zero == 3 else candidate.zero  # a stage gathers once a step under each
        return replace(candidate, pp=2, schedule="1f1b", chunks=1, microbatches=count, zero=zero)

    def run(self, candidate: Candidate, rows: int, *, only_passes: bool = False) -> Trace:
        """Run a step on shapes for `sums`. candidate: of `traced`. rows: of a microbatch, over all ranks.

        only_passes: as for `trace_step`.
        """
        mesh = ProcessMesh.grid(**candidate.axes)
        plan = replace(self.plan_of(candidate, rows), pipeline=PipelinePlan(microbatches=candidate.microbatches))
        shape = self.shape(rows * candidate.microbatches, candidate.microbatches)
        key = plan.zero > 0, candidate.pp > 1
        if key not in self._reduced:
            self._reduced[key] = reduce_model(self.model, plan, is_stage=candidate.pp > 1)
        with self.autocast():
            return trace_step(
                *(self.model, mesh, plan, shape),
                clip_norm=self.clip_norm,
                update=self.update,
                states=self.states,
                reduced=self._reduced[key],
                by_gradient=True,
                only_passes=only_passes,
            )
