"""The space of a search for plans: every mesh of a number of processes, with every combination of options.

A `Candidate` is a mesh with a plan. A `Space` lists all candidates in families, and `check_members` refuses families
that cannot run. Imports no torch until a `ParallelPlan` is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from ..checks import divisors
from ..plan_options import Context, Recompute, Zero
from ..schedules.pipeline_plan import PipelinePlan, make_schedule
from ..schedules.schedule import NAMES, Schedule, ScheduleName
from .schedule_bounds import bounds_of

if TYPE_CHECKING:
    from ..parallel.plan import ParallelPlan

CONTEXTS: tuple[Context, ...] = get_args(Context)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
ZEROS: tuple[Zero, ...] = get_args(Zero)
# Without zero_bubble: `compose` does not know for how long zero_bubble holds operands of weight gradients.
SEARCHED_SCHEDULES: tuple[ScheduleName, ...] = tuple(name for name in NAMES if name != "zero_bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mesh and a plan, as sizes and options: the unit of a search. The defaults are a single process's plan."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # ranks over which a mixture's experts are divided, taken from dp x cp
    over_tp: bool = False  # whether "ep" is taken from dp x cp x tp instead
    context: Context | None = None  # None: cp is 1
    schedule: ScheduleName | None = None  # None: pp is 1
    chunks: int = 1  # stages on a rank
    microbatches: int = 1
    sequence: bool = False
    zero: Zero = 0
    recompute: Recompute = "none"

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes with their sizes, as `weft train` makes the mesh: pp and cp only above size 1."""
        sizes = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("dp", "tp")}

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes the gradients of weights apart. Raises ValueError as `bounds_of`."""
        return self.schedule is not None and bounds_of(self.schedule).splits_backward

    @property
    def data_ranks(self) -> int:
        """dp x cp: the number of ranks over which ZeRO shards a parameter outside experts."""
        return self.dp * self.cp

    @property
    def pipeline(self) -> PipelinePlan | None:
        """How the model is cut into stages; None without an axis "pp"."""
        if self.schedule is None:
            return None
        chunks = self.chunks if self.chunks > 1 else None
        return PipelinePlan(schedule=self.schedule, microbatches=self.microbatches, chunks=chunks)

    def make_schedule(self) -> Schedule | None:
        """The pipeline's actions; None without an axis "pp"."""
        if self.schedule is None:
            return None
        return make_schedule(self.schedule, ranks=self.pp, microbatches=self.microbatches, chunks=self.chunks)

    def rows_on_rank(self, rows: int) -> int:
        """The rows of a microbatch on rank 0, which has the most, in a step with `rows` rows."""
        return -(-rows // (self.microbatches * self.dp))

    def least_rows(self, rows: int) -> int:
        """The rows of a microbatch on the rank with the fewest, in a step with `rows` rows."""
        return rows // (self.microbatches * self.dp)

    def parallel_plan(self, model_plan: ParallelPlan) -> ParallelPlan:
        """`model_plan` with this candidate's options. model_plan: the model's own `parallel_plan()`.

        A way of tokens to experts in `model_plan` is kept.
        """
        from ..parallel.plan import ExpertPlan  # imported here because torch takes seconds

        options: dict[str, Any] = {name: getattr(self, name) for name in ("sequence", "context", "zero", "recompute")}
        way = model_plan.experts.tokens if model_plan.experts else None
        experts = ExpertPlan(size=self.ep, over_tp=self.over_tp, tokens=way) if self.ep > 1 else None
        return replace(model_plan, pipeline=self.pipeline, experts=experts, **options)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders plans of equal seconds, simpler first. No two candidates have the same complexity.

        The number of options and axes in use, then the sizes of pp, cp, ep and tp, then the options in the order of
        the fields.
        """
        options = (
            CONTEXTS.index(self.context) + 1 if self.context else 0,
            NAMES.index(self.schedule) + 1 if self.schedule else 0,
            self.chunks - 1,
            self.microbatches - 1,
            int(self.sequence),
            self.zero,
            RECOMPUTES.index(self.recompute),
        )
        sizes = (self.pp, self.cp, self.ep, int(self.over_tp), self.tp)
        in_use = sum(size > 1 for size in (*sizes, self.dp)) + sum(option > 0 for option in options)
        return (in_use, *sizes, *options)

    def __str__(self) -> str:
        sizes = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        mesh = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"
        options = ["ep over tp"] * self.over_tp
        options += [] if self.schedule is None else [self.schedule + (f" x {self.chunks}" if self.chunks > 1 else "")]
        options += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        options += [f"zero={self.zero}"] * (self.zero > 0) + ["sequence"] * self.sequence
        options += [] if self.context is None else [self.context]
        options += [f"recompute {self.recompute}"] * (self.recompute != "none")
        return ", ".join([mesh, *options])


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The candidates of a search: every mesh of `processes` ranks, with every combination of the options below.

    An option without effect keeps a single value: `sequence` with tp=1, `zero` without a second rank holding the same
    parameters, `context` with cp=1, `schedule` with pp=1. Every number of microbatches divides the rows.
    Raises ValueError for processes or rows below 1, and for a schedule without a row in `SCHEDULE_BOUNDS`.
    """

    processes: int
    rows: int  # of a step, over all ranks
    num_experts: int = 0  # of a layer; 0 for a model without mixtures
    contexts: tuple[Context, ...] = CONTEXTS
    schedules: tuple[ScheduleName, ...] = SEARCHED_SCHEDULES  # and the schedule that `fixed` names
    chunks: tuple[int, ...] = (2,)  # of the schedule "interleaved"
    zeros: tuple[Zero, ...] = ZEROS
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    sequences: tuple[bool, ...] = (False, True)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of `Candidate` with a single value, by name

    def __post_init__(self) -> None:
        for name in ("processes", "rows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be 1 or more")
        for schedule, _ in self._schedules():
            if schedule is not None:
                bounds_of(schedule)

    def meshes(self) -> Iterator[Candidate]:
        """Every way to write `processes` as pp x dp x cp x tp, as candidates without further options."""
        for pp in divisors(self.processes):
            for cp in divisors(self.processes // pp):
                for tp in divisors(self.processes // pp // cp):
                    mesh = Candidate(pp=pp, cp=cp, tp=tp, dp=self.processes // pp // cp // tp)
                    if self._allows(mesh, "pp", "dp", "cp", "tp"):
                        yield mesh

    def _allows(self, candidate: Candidate, *names: str) -> bool:
        """Whether these fields of the candidate agree with `fixed`."""
        return all(getattr(candidate, name) == self.fixed.get(name, getattr(candidate, name)) for name in names)

    def families(self) -> Iterator[Candidate]:
        """Every candidate with sequence, zero and recompute at the simplest values; see `members`."""
        counts = divisors(self.rows)
        for mesh in self.meshes():
            yield from self._families_on(mesh, self._expert_sizes(mesh), counts)

    def _families_on(
        self, mesh: Candidate, sizes_of_experts: Iterable[Candidate], counts: Iterable[int]
    ) -> Iterator[Candidate]:
        """The families of `families` on a mesh. counts: the numbers of microbatches."""
        contexts: tuple[Context | None, ...] = self.contexts if mesh.cp > 1 else (None,)
        schedules = list(self._schedules()) if mesh.pp > 1 else [(None, 1)]
        for experts in sizes_of_experts:
            for context, (schedule, chunks), count in product(contexts, schedules, counts):
                family = replace(experts, context=context, schedule=schedule, chunks=chunks, microbatches=count)
                if self._allows(family, "ep", "over_tp", "context", "schedule", "chunks", "microbatches"):
                    yield family

    def __contains__(self, candidate: Candidate) -> bool:
        """Whether the candidate is a member of a family of the space."""
        mesh = Candidate(pp=candidate.pp, dp=candidate.dp, cp=candidate.cp, tp=candidate.tp)
        if mesh.processes != self.processes or self.rows % candidate.microbatches:
            return False
        if not self._allows(mesh, "pp", "dp", "cp", "tp"):
            return False
        experts = replace(mesh, ep=candidate.ep, over_tp=candidate.over_tp)
        if experts not in self._expert_sizes(mesh):
            return False
        family = family_of(candidate)
        families = self._families_on(mesh, [experts], [candidate.microbatches])
        return family in families and candidate in self.members(family)

    def _schedules(self) -> Iterator[tuple[ScheduleName | None, int]]:
        fixed = self.fixed.get("schedule")
        for schedule in (*self.schedules, *(name for name in NAMES if name == fixed and name not in self.schedules)):
            yield from ((schedule, chunks) for chunks in (self.chunks if schedule == "interleaved" else (1,)))

    def _expert_sizes(self, mesh: Candidate) -> Iterator[Candidate]:
        """The mesh with every size of "ep" that divides the experts."""
        yield mesh
        if not self.num_experts:
            return
        for over_tp in (False, True) if mesh.tp > 1 else (False,):
            ranks = mesh.data_ranks * (mesh.tp if over_tp else 1)
            sizes = divisors(math.gcd(ranks, self.num_experts))
            yield from (replace(mesh, ep=ep, over_tp=over_tp) for ep in sizes if ep > 1)

    def members(self, family: Candidate) -> Iterator[Candidate]:
        """The candidates of a family: with every value of sequence, zero and recompute."""
        for sequence, zero, recompute in product(*self._options(family)):
            yield replace(family, sequence=sequence, zero=zero, recompute=recompute)

    def count_members(self, family: Candidate) -> int:
        """The number of `members`."""
        sequences, zeros, recomputes = self._options(family)
        return len(sequences) * len(zeros) * len(recomputes)

    def _options(self, family: Candidate) -> tuple[list[bool], list[Zero], list[Recompute]]:
        """The values of sequence, zero and recompute in a family."""
        sequences = self.sequences if family.tp > 1 else (False,)
        # Experts over tp are replicated on dp x cp x tp / ep ranks.
        replicated = family.data_ranks > 1 or (family.over_tp and family.ep < family.tp)
        zeros = self.zeros if replicated else self.zeros[:1]
        return (
            [each for each in sequences if self.fixed.get("sequence", each) == each],
            [each for each in zeros if self.fixed.get("zero", each) == each],
            [each for each in self.recomputes if self.fixed.get("recompute", each) == each],
        )


def family_of(candidate: Candidate) -> Candidate:
    """The candidate that stands for the family of a member in `Space.families`."""
    return replace(candidate, sequence=False, zero=0, recompute="none")


def check_members(
    space: Space, family: Candidate, check: Callable[[Candidate], None]
) -> tuple[list[Candidate], dict[str, int]]:
    """The members of a family of the space, and the number of refused members by reason.

    check: raises ValueError for a candidate that cannot run. Called once, with the family's simplest candidate: `check`
        must not depend on sequence, zero and recompute.
    """
    members = list(space.members(family))
    try:
        check(family)
    except ValueError as error:
        return [], {reason_of(error): len(members)}
    return members, {}


def reason_of(error: ValueError) -> str:
    """The first clause of an error, with n for each number: equal for errors of the same kind."""
    clause = re.split(r"[;:,](?:\s|$)", str(error), maxsplit=1)[0]
    return re.sub(r"\d[\d,]*", "n", clause)
