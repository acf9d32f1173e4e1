"""Candidates of a search over plans as configurations of a run, and back; the run's step as a `Workload`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ..checks import check_tensor_parallel
from ..parallel.plan import ExpertPlan
from ..predict.plans import Candidate
from ..predict.workload import Workload
from .config import MeshConfig, TrainConfig
from .explanation import Outline
from .measure import flops_per_token
from .model_class import check_class, parameters_of
from .optimizer import communicate_update, count_states
from .run import axes_of, check_reference, complete_plan


def config_with(config: TrainConfig, candidate: Candidate) -> TrainConfig:
    """The configuration of a run on the candidate's mesh by the candidate's plan, with all plan options filled in.

    config: of the run; the candidate's sizes and options replace the config's. Raises ValueError for a candidate
    refused by `weft train`.
    """
    sizes = {"dp": candidate.dp, "cp": candidate.cp, "tp": candidate.tp}
    is_divided = candidate.pp > 1 or candidate.microbatches > 1
    plan = replace(
        config.plan,
        sequence=candidate.sequence,
        context=candidate.context,
        schedule=candidate.schedule,
        microbatches=candidate.microbatches if is_divided else None,
        recompute=candidate.recompute,
        zero=candidate.zero,
        experts_over_tp=candidate.over_tp,
    )
    config = replace(config, mesh=MeshConfig(pp=candidate.pp, ep=candidate.ep, **sizes), plan=plan)
    check_tensor_parallel(config.model, candidate.tp)
    config = replace(config, plan=complete_plan(plan, config, **sizes))
    if config.model_class is not None:
        ordered = config.plan.context == "all_gather"
        check_class(config.model_class, ordered=ordered, documents=False, compiled=config.compile)
    check_reference(config, axes_of(pp=candidate.pp, **sizes))
    return config


def checker(config: TrainConfig) -> Callable[[Candidate], None]:
    """A function for a search, which raises ValueError for a candidate refused by `weft train`."""

    def check(candidate: Candidate) -> None:
        config_with(config, candidate)

    return check


def candidate_of(config: TrainConfig, axes: Mapping[str, int]) -> Candidate:
    """The mesh and the plan of a run as a search's candidate.

    config: of the run, with all plan options filled in. axes: the mesh's axes with their sizes.
    Raises ValueError for a plan with --plan.split, since a candidate's layers are cut as evenly as possible, and with
    --plan.exact, which has no price.
    """
    if config.plan.exact is not None:
        raise ValueError(
            f"--plan.exact {config.plan.exact}: a prediction on a chip knows no sums in the order of a named mesh; "
            f"leave out --plan.exact, or --chip"
        )
    if config.plan.split not in (None, "layers"):
        raise ValueError(
            f"--plan.split {config.plan.split!r}: a prediction on a chip cuts the layers as evenly as possible; "
            f"leave --plan.split out"
        )
    plan, pp = config.plan, axes.get("pp", 1)
    return Candidate(
        **{axis: axes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")},
        ep=config.mesh.ep,
        over_tp=bool(plan.experts_over_tp),
        context=plan.context if axes.get("cp", 1) > 1 else None,
        schedule=(plan.schedule or "1f1b") if pp > 1 else None,
        chunks=2 if plan.schedule == "interleaved" and pp > 1 else 1,
        microbatches=plan.microbatches or 1,
        sequence=bool(plan.sequence) and axes.get("tp", 1) > 1,
        zero=plan.zero,
        recompute=plan.recompute,
    )


def workload_of(config: TrainConfig) -> Workload:
    """The step of a run on a GPU, to be planned for any candidate. The mesh of `config` is not used."""
    way = config.plan.experts_tokens  # refused by `config_with` without an axis "ep"
    config = config_with(replace(config, plan=replace(config.plan, experts_tokens=None)), Candidate())
    outline = Outline.of(config, {"dp": 1, "tp": 1}, "cuda")
    shape, model = outline.step_shape(0), outline.make_model()
    return Workload(
        model=model,
        rows=outline.batch_shape[0],
        tokens=outline.batch_shape[1],
        dtype=outline.dtype,
        reduce_dtype=shape.reduce_dtype,
        criterion=shape.criterion,
        inputs=shape.inputs,
        clip_norm=config.optimizer.clip_norm,
        update=partial(communicate_update, config=config.optimizer),
        states=count_states(model, config.optimizer),
        is_compiled=config.compile,
        plan=replace(outline.plan, experts=ExpertPlan(tokens=way)),
    )


def step_flops(config: TrainConfig) -> float:
    """Floating-point operations of a step of the whole batch, as for the metric tflops, without recomputation."""
    _, multiplying = parameters_of(config.model, config.model_class)
    tokens = config.data.sequence_length
    return float(flops_per_token(config.model, tokens, multiplying=multiplying) * tokens * config.data.batch_size)
