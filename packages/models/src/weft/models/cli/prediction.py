"""`weft explain --chip`: predicts time and memory of a run's step on a chip, and finds faster changes of the plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..predict.advice import ChangedPlan, advise
from ..predict.chip import Chip
from ..predict.estimate import Estimate
from ..predict.find_plans import parameters_of
from ..predict.forks import Forks
from ..predict.memory import MemoryParts
from ..predict.plan_memory import PlanMemory
from ..predict.plan_prices import PlanPrices
from ..predict.plan_runs import PlanRun, PlanRuns
from ..predict.plans import Candidate
from ..predict.stage_traces import StageTraces
from ..predict.timeline_picture import timeline_json, timeline_svg
from ..terminal import PROGRAM, gib
from ..train.candidates import candidate_of, checker, config_with, step_flops, workload_of
from ..train.config import MeshConfig, PlanConfig, TrainConfig
from ..train.suggestions import NoOption, options_between


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run's step on a chip. Made by `Predictor`."""

    config: TrainConfig  # without mesh and plan
    candidate: Candidate  # the run's mesh and plan
    chip: Chip
    limit: int  # bytes of a device
    estimate: Estimate
    memory_bytes: int  # of the fullest rank, at the peak of a step
    find_changed_plans: Callable[[], list[ChangedPlan]]  # calls `advise`, which takes seconds


class Predictor:
    """Predicts a run's step on a chip.

    config, axes: from `complete_configuration`. Raises ValueError as `candidate_of`.
    """

    def __init__(self, config: TrainConfig, axes: Mapping[str, int], chip: Chip) -> None:
        self._candidate = candidate_of(config, axes)
        self._config = replace(config, mesh=MeshConfig(), plan=PlanConfig(experts_tokens=config.plan.experts_tokens))
        workload = workload_of(self._config)
        self._prices = PlanPrices(
            workload=workload,
            chip=chip,
            processes=self._candidate.processes,
            limit=chip.memory_bytes,
            flops=step_flops(self._config),
            memory=PlanMemory(workload=workload, parameters=parameters_of(workload)),
            stages=StageTraces(workload=workload),
        )

    @property
    def runs(self) -> tuple[Callable[..., Any], ...]:
        """The functions for `Forks` that run steps on shapes."""
        prices = self._prices
        return prices.workload.run, prices.stages.run, prices.memory.run, prices.memory.run_forward

    def start(self, forks: Forks, *, has_parts: bool) -> None:
        """Start the runs for `predict`. has_parts: whether `predict` is given the parts of the memory."""
        PlanRuns(forks).start(self._needed(has_parts=has_parts))

    def predict(self, forks: Forks, parts: MemoryParts | None = None) -> Prediction:
        """The prediction.

        parts: of the step's memory, from `ExplainedStep`; None to run the step. Communication: none.
        Raises ValueError as `record`, and for a dtype without a peak in the chip.
        """
        prices, candidate, runs = self._prices, self._candidate, PlanRuns(forks)
        if parts is not None:
            prices.memory.parts.learn(*prices.memory.run_for(candidate), parts)
        runs.prepare(self._needed(has_parts=parts is not None))
        found, nbytes = prices.estimate(candidate, keep_spans=True), prices.memory.peak(candidate)

        def find_changed_plans() -> list[ChangedPlan]:
            return advise(
                *(prices, candidate, checker(self._config)),
                seconds=found.seconds,
                parts={str(part): seconds for part, seconds in found.parts.items()},
                memory_bytes=nbytes,
                runs=runs,
            )

        return Prediction(
            config=self._config,
            candidate=candidate,
            chip=prices.chip,
            limit=prices.limit,
            estimate=found,
            memory_bytes=nbytes,
            find_changed_plans=find_changed_plans,
        )

    def _needed(self, *, has_parts: bool) -> list[PlanRun]:
        prices, candidate = self._prices, self._candidate
        peak = [] if has_parts else prices.peak_runs(candidate)
        return [*peak, *prices.price_runs(candidate), *prices.even_runs([candidate.recompute])]


def plan_command(found: Prediction, chip: str, name: str | None, base: TrainConfig) -> str:
    """The `weft plan` command that searches all plans for the run.

    chip: as given by --chip. name: of the recipe; None without. base: the recipe's configuration, from which the run
    differs by options.
    """
    own = [*([] if name is None else [name]), "--processes", str(found.candidate.processes), "--chip", chip]
    chosen = replace(found.config, mesh=base.mesh, plan=base.plan, output=base.output, resume=base.resume)
    try:
        options = options_between(chosen, base, "")
    except NoOption:  # no option sets a value of the model; only a file can
        options = ["--config", "FILE"]
    return shlex.join([PROGRAM, "plan", *own, *options])


def lines_of(found: Prediction, search_all: str) -> Iterator[str]:
    """The prediction as lines of text. search_all: of `plan_command`. Calls `find_changed_plans`."""
    estimate, count = found.estimate, found.candidate.processes
    yield (
        f"on {count:,} x {found.chip.name}, predicted: {estimate.seconds:.4g} s a step, "
        f"{estimate.tokens_per_second:,.0f} tokens/s ({estimate.tokens_per_second / count:,.0f} a device), "
        f"MFU {estimate.mfu:.1%}"
    )
    shares = [(part, seconds) for part, seconds in estimate.parts.items() if seconds / estimate.seconds >= 0.0005]
    for part, seconds in sorted(shares, key=lambda pair: -pair[1]):
        yield f"  {part.replace('_', ' '):15} {seconds:>10.4g} s  {seconds / estimate.seconds:>6.1%}"
    room = found.limit - found.memory_bytes
    verdict = f"{gib(room)} are free" if room >= 0 else f"does not fit: {gib(-room)} too much"
    yield f"memory of the fullest rank: {gib(found.memory_bytes)} of {gib(found.limit)}; {verdict}"
    yield from _lines_of_changes(found, search_all)


def _lines_of_changes(found: Prediction, search_all: str) -> Iterator[str]:
    changes, fits = found.find_changed_plans(), found.memory_bytes <= found.limit
    if changes:
        yield "change first" if fits else "changes that fit"
    for number, each in enumerate(changes, 1):
        faster = each.seconds / found.estimate.seconds - 1
        yield f"  {number}  {_options(found, each)}: {each.seconds:.4g} s ({faster:+.1%}), {gib(each.memory_bytes)}"
    if not changes:
        tried = "no single change of the plan tried is faster" if fits else "no single change tried fits"
        yield f"{tried}; search all: {search_all}"


def as_values(found: Prediction) -> dict[str, Any]:
    """The prediction as values for JSON. Calls `find_changed_plans`."""
    return {
        "chip": found.chip.name,
        "processes": found.candidate.processes,
        "seconds": found.estimate.seconds,
        "tokens_per_second": found.estimate.tokens_per_second,
        "mfu": found.estimate.mfu,
        "memory_bytes": found.memory_bytes,
        "memory_limit_bytes": found.limit,
        "fits": found.memory_bytes <= found.limit,
        "parts": dict(found.estimate.parts),
        "plan": asdict(found.candidate),
        "changes": [
            {
                "options": _options(found, each),
                "seconds": each.seconds,
                "memory_bytes": each.memory_bytes,
                "plan": asdict(each.candidate),
                "compile": each.is_compiled,
            }
            for each in found.find_changed_plans()
        ],
    }


def write_timeline(found: Prediction, path: Path, title: str) -> None:
    """Write the step's timeline: as a picture to a .svg file, else as JSON for Perfetto."""
    timeline = found.estimate.timeline
    text = timeline_svg(timeline, title) if path.suffix == ".svg" else timeline_json(timeline)
    path.write_text(text, encoding="utf-8")


def _options(found: Prediction, change: ChangedPlan) -> str:
    """The options that turn the run into the changed plan, as on the command line."""
    changed = config_with(found.config, change.candidate)
    base = config_with(found.config, found.candidate)
    try:
        options = options_between(replace(changed, compile=change.is_compiled), base, "")
    except NoOption:
        return str(change.candidate)
    return shlex.join(options)
