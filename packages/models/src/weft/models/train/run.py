"""A training run with all options filled in: mesh sizes, plan options, data and folders. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import check_head_degrees, check_tensor_parallel, divisors
from ..data.sources import Data
from ..exact import (
    check_batch,
    check_exact,
    check_microbatches,
    check_task,
    check_ulysses,
    parse_exact,
    refuse_compiled,
)
from ..schedules.pipeline_plan import PipelinePlan
from .config import MeshConfig, PlanConfig, TrainConfig
from .task_config import LoRAConfig, reference_axes, reference_of

if TYPE_CHECKING:
    from ..data.examples.source import Examples

MOST_MICROBATCHES = 2**16  # every microbatch is an entry in the schedule of every stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run with all options filled in: made by `weft train`, then given to each of the run's processes."""

    recipe: str | None  # None if no recipe was named, and the model comes from --from or --model
    config: TrainConfig
    # the documents to train on, prepared or read from files of text or records; or a task's examples
    corpus: Data | Examples
    # sizes of the mesh's axes
    pp: int = 1
    dp: int
    cp: int = 1
    tp: int
    folder: Path  # where the run is saved
    resume: Path | None = None  # the checkpoint to resume from
    origin: Path | None = None  # the folder of a new run's initial weights; None: drawn from the seed
    reference: Path | None = None  # the folder of a reference model's weights; None: the run's own initial weights
    reference_sha256: str | None = None  # `fingerprint` of that folder, which a resumed run must find unchanged
    # the folder whose model the saved adapters belong to; None: the final model is saved with its adapters merged
    adapter_base: Path | None = None
    # the config before the command's options; None: the recipe's
    base: TrainConfig | None = None
    last_step: int | None = None  # of a replay: the step, from 1, after which it ends, and saves no model
    digested_steps: tuple[int, ...] = ()  # the steps, from 1, of which the run compared with has digests
    notes: tuple[str, ...] = ()  # lines to print before the run starts

    @property
    def title(self) -> str:
        """The run's name for people: the recipe, or the folder or class of the model."""
        return title_of(self.recipe, self.config)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes with their sizes, from `axes_of`."""
        return axes_of(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def resolved(self) -> TrainConfig:
        """The config with the mesh's actual sizes."""
        return replace(self.config, mesh=replace(self.config.mesh, dp=self.dp, cp=self.cp, tp=self.tp, pp=self.pp))

    @property
    def processes(self) -> int:
        """The number of processes of the mesh."""
        return self.pp * self.dp * self.cp * self.tp


def title_of(recipe: str | None, config: TrainConfig) -> str:
    """The recipe's name; without a recipe, the name of the model's folder or class."""
    if recipe is not None:
        return recipe
    return config.from_.resolve().name if config.from_ is not None else str(config.model_class).rpartition(":")[2]


def axes_of(*, pp: int, dp: int, cp: int, tp: int) -> dict[str, int]:
    """A mesh's axes with their sizes: dp and tp always, pp and cp only above size 1."""
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("dp", "tp")}


def mesh_sizes(mesh: MeshConfig, processes: int, *, every_process: bool) -> tuple[int, int, int]:
    """Choose (dp, cp, tp) for a number of processes: sizes given in `mesh`, and missing sizes by which all are used.

    every_process: all must be used, as under a launcher; otherwise dp and tp, if both are given, may use fewer.
    Raises ValueError for a mesh that does not fit the processes.
    """
    dp, cp, tp = mesh.dp, mesh.cp, mesh.tp
    pp_cp = mesh.pp * cp
    dp_tp = processes // pp_cp
    if tp is None:
        tp = dp_tp // dp if dp else (2 if dp_tp % 2 == 0 else 1)
    if dp is None:
        dp = dp_tp // tp
    used = dp * pp_cp * tp
    if used < 1 or (used != processes if every_process or None in (mesh.dp, mesh.tp) else used > processes):
        sizes = (
            ("pp", mesh.pp if mesh.pp > 1 else None),
            ("dp", mesh.dp),
            ("cp", cp if cp > 1 else None),
            ("tp", mesh.tp),
        )
        shown = " x ".join(f"{name}={size}" for name, size in sizes if size is not None)
        fits = f"dp x tp that fit: {', '.join(f'{dp_tp // n} x {n}' for n in divisors(dp_tp))}"
        axes_text = " x ".join(f"{name}={size}" for name, size in (("pp", mesh.pp), ("cp", cp)) if size > 1)
        if axes_text:
            names = "pp x cp" if mesh.pp > 1 and cp > 1 else "pp" if mesh.pp > 1 else "cp"
            fits = (
                f"beside {axes_text}, {fits}"
                if processes % pp_cp == 0
                else f"{names} that fit: {', '.join(map(str, divisors(processes)))}"
            )
        raise ValueError(f"mesh {shown} does not fit {processes} process{'es' if processes > 1 else ''}; {fits}")
    return dp, cp, tp


def complete_plan(plan: PlanConfig, config: TrainConfig, *, dp: int, cp: int, tp: int) -> PlanConfig:
    """Fill in the options of `plan` implied by the mesh: context, schedule, microbatches and split.

    Raises ValueError for heads, experts, microbatches or stages that do not divide, for pipeline options without
    mesh.pp above 1, for options of experts without mesh.ep above 1, and for a run that cannot keep to `plan.exact`, as
    the functions of exact.py.
    """
    _check_experts(plan, config, dp=dp, cp=cp, tp=tp)
    exact = None if plan.exact is None else parse_exact(plan.exact)
    if exact is not None:
        check_exact({"dp": dp, "cp": cp, "tp": tp, "ep": config.mesh.ep}, exact)
        check_task(exact, config.task)
        if config.compile:
            refuse_compiled(exact)
    context = plan.context or ("all_gather" if cp > 1 else None)
    if context == "ulysses":
        sizes = {name: size for name, size in config.model.parallel_sizes.items() if name.endswith("heads")}
        check_head_degrees(sizes, cp=cp, tp=tp if exact is None else exact.get("tp", 1))
        if exact is not None:
            check_ulysses(exact)
    completed, rows, pp = replace(plan, context=context), config.data.batch_size, config.mesh.pp
    if pp == 1:
        for name in ("schedule", "split"):
            if getattr(plan, name) is not None:
                raise ValueError(
                    f"plan.{name} is {getattr(plan, name)}, which needs a pipeline; set --mesh.pp above 1 too"
                )
    else:
        if exact is not None:
            check_microbatches(exact, plan.microbatches, rows)
        most = next((n for n in range(min(8, rows // dp), 0, -1) if rows % (n * dp) == 0), 1)
        completed = replace(
            completed,
            schedule=plan.schedule or "1f1b",
            microbatches=plan.microbatches or most,
            split=plan.split or "layers",
        )
    count = completed.microbatches or 1
    if count < 1 or rows % count:
        fit = ", ".join(map(str, divisors(rows)))
        raise ValueError(f"plan.microbatches {count} does not divide data.batch_size {rows}; numbers that do: {fit}")
    if count > MOST_MICROBATCHES:
        raise ValueError(f"plan.microbatches {count} is above {MOST_MICROBATCHES}; take {MOST_MICROBATCHES:,} or fewer")
    if exact is not None:
        check_batch(exact, rows // count, config.data.sequence_length)
    # checked before a schedule with an entry per stage is made
    if pp > config.model.num_layers:
        raise ValueError(
            f"the model has {config.model.num_layers} layers, which cannot be cut into {pp} stages; lower mesh.pp"
        )
    pipeline = completed.pipeline(pp)
    if pipeline is not None:
        stages = pipeline.count_stages(pp)
        if stages > config.model.num_layers:
            raise ValueError(
                f"the model has {config.model.num_layers} layers, which cannot be cut into {stages} stages; lower "
                "mesh.pp" + (", or take another schedule" if stages > pp else "")
            )
        counts = [each for each in pipeline.split if isinstance(each, int)]  # empty unless split lists numbers
        if counts and (len(counts) != stages or sum(counts) != config.model.num_layers):
            raise ValueError(
                f"plan.split {plan.split} gives {len(counts)} stages {sum(counts)} layers; there are {stages} "
                f"stages and {config.model.num_layers} layers"
            )
        if pipeline.split != "layers" and not counts:
            _check_names(config, pipeline, pp)
    return completed


def reference_config(config: TrainConfig, axes: Mapping[str, int]) -> tuple[TrainConfig, dict[str, int]]:
    """The config of the reference model of dpo or kto, without adapters, and the sizes of pp, dp, cp and tp.

    axes: of the run's mesh. Experts keep mesh.ep where it divides the reference's mesh, and else are not spread.
    Raises ValueError as `reference_axes`; as `check_tensor_parallel` and `complete_plan`, with the reference's mesh.
    """
    sizes = reference_axes(config, axes)
    pp, dp, cp, tp = sizes.values()
    zero = config.reference_zero if config.reference_zero is not None else (3 if config.plan.zero == 3 else 0)
    plan = replace(config.plan, zero=zero, recompute="none", context=None)
    if pp != axes.get("pp", 1):
        plan = replace(plan, schedule=None, split=None)
    mesh = replace(config.mesh, **sizes)
    if dp * cp * (tp if plan.experts_over_tp else 1) % mesh.ep:
        mesh, plan = replace(mesh, ep=1), replace(plan, experts_tokens=None, experts_over_tp=False)
    config = replace(config, mesh=mesh, lora=LoRAConfig(), plan=plan, compile=False)
    try:
        check_tensor_parallel(config.model, tp)
        return replace(config, plan=complete_plan(plan, config, dp=dp, cp=cp, tp=tp)), sizes
    except ValueError as error:
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"reference_mesh is {shown}, which the reference model cannot have: {error}") from None


def check_reference(config: TrainConfig, axes: Mapping[str, int]) -> None:
    """Raise ValueError as `reference_config`, for a run of dpo or kto with a reference model. axes: of its mesh."""
    if reference_of(config) in ("model", "precomputed"):
        reference_config(config, axes)


def _check_experts(plan: PlanConfig, config: TrainConfig, *, dp: int, cp: int, tp: int) -> None:
    """Raise ValueError where mesh.ep does not divide the data axes or the model's experts.

    Also for mesh.ep above 1 without experts in the model, and for options of experts without mesh.ep above 1.
    """
    ep, num_experts = config.mesh.ep, getattr(config.model, "num_experts", None)
    if ep == 1:
        for name, value in (("experts_tokens", plan.experts_tokens), ("experts_over_tp", plan.experts_over_tp)):
            if value:
                raise ValueError(f"plan.{name} is {value}, which needs experts over an axis; set --mesh.ep above 1 too")
        return
    if num_experts is None and config.model_class is None:
        raise ValueError(f"mesh.ep is {ep}, but a {config.model.title} has no experts; leave it at 1")
    ranks, axes = (dp * cp * tp, "dp x cp x tp") if plan.experts_over_tp else (dp * cp, "dp x cp")
    if ranks % ep:
        raise ValueError(
            f"mesh.ep {ep} does not divide the {ranks} process{'es' if ranks > 1 else ''} of {axes}; sizes that do: "
            f"{', '.join(map(str, divisors(ranks)))}"
        )
    if num_experts is not None and num_experts % ep:
        raise ValueError(
            f"mesh.ep {ep} does not divide model.num_experts {num_experts}; sizes that do: "
            f"{', '.join(map(str, divisors(num_experts)))}"
        )


def _check_names(config: TrainConfig, pipeline: PipelinePlan, pp: int) -> None:
    """Raise ValueError for a split whose layer names do not cut the model into the schedule's number of stages."""
    import torch  # imported here because torch takes seconds

    from ..parallel.pipeline.cut import ranges_of
    from .model_class import make_model_of

    with torch.device("meta"):
        model = make_model_of(config.model, config.model_class)
    ranges_of(model, pipeline, pipeline.make_schedule(pp))
