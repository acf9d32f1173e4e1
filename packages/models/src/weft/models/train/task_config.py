"""The options of fine-tuning and preference tuning: adapters, the losses of preferences, and the reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from ..checks import check_above_zero, check_at_least, check_at_most, check_kinds
from ..config import shown

ReferenceKind = Literal["model", "adapters", "precomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA), which are then trained alone."""

    rank: int = 0
    """Rank of the adapters; 0: no adapters, and all weights are trained."""
    alpha: float = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], shown("NAME ...", "'*_proj'")] = ("*_proj",)
    """Linear layers with an adapter: full names with wildcards, or last parts of names, as in q_proj v_proj."""
    dropout: float = 0.0
    """Dropout of an adapter's input."""

    def __post_init__(self) -> None:
        check_kinds("lora", self)
        check_at_least("lora", self, 0, "rank", "dropout")
        check_at_most("lora", self, 2**20, "rank")
        check_above_zero("lora", self, "alpha")
        if self.dropout >= 1:
            raise ValueError(f"lora.dropout is {self.dropout}; it must be below 1")
        if not self.targets:
            raise ValueError("lora.targets is empty; name layers, as in --lora.targets q_proj v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization (Rafailov et al. 2023): --task dpo."""

    beta: float = 0.1
    """Weight of the distance to the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: the loss of DPO; ipo: of Azar et al. 2023, whose log-probabilities are means over tokens."""
    label_smoothing: float = 0.0
    """Share of pairs assumed to be labeled the wrong way around; with sigmoid."""
    length_normalized: bool = False
    """Take means of log-probabilities over an answer's tokens in place of sums; ipo always does."""

    def __post_init__(self) -> None:
        check_kinds("dpo", self)
        check_above_zero("dpo", self, "beta")
        check_at_least("dpo", self, 0, "label_smoothing")
        if self.label_smoothing >= 0.5:
            raise ValueError(f"dpo.label_smoothing is {self.label_smoothing}; it must be below 0.5")
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError(f"dpo.label_smoothing is {self.label_smoothing}, but dpo.loss ipo has none; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOConfig:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024): --task kto."""

    beta: float = 0.1
    """Weight of the distance to the reference."""
    desirable_weight: float = 1.0
    """Weight of the losses of desirable completions."""
    undesirable_weight: float = 1.0
    """Weight of the losses of undesirable completions."""

    def __post_init__(self) -> None:
        check_kinds("kto", self)
        check_above_zero("kto", self, "beta")
        check_at_least("kto", self, 0, "desirable_weight", "undesirable_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMeshConfig:
    """Axes of the reference model's mesh, over the processes of the run; missing ones are as in mesh."""

    pp: Annotated[int | None, shown("INT", "mesh.pp")] = None
    """Pipeline parallel."""
    dp: Annotated[int | None, shown("INT", "mesh.dp")] = None
    """Data parallel."""
    cp: Annotated[int | None, shown("INT", "mesh.cp")] = None
    """Context parallel."""
    tp: Annotated[int | None, shown("INT", "mesh.tp")] = None
    """Tensor parallel."""

    def __post_init__(self) -> None:
        check_kinds("reference_mesh", self)
        sizes = (name for name in ("pp", "dp", "cp", "tp") if getattr(self, name) is not None)
        check_at_least("reference_mesh", self, 1, *sizes)


def check_task_options(config: Any) -> None:
    """Raise ValueError for options of a task, of adapters or of a reference which the run lacks. config: `TrainConfig`.

    Also for dropout of adapters in compiled blocks under full recomputation.
    """
    check_loss_options(config.task, config.dpo, config.kto)
    if config.compile and config.plan.recompute == "full" and config.lora.dropout:
        raise ValueError(
            f"lora.dropout is {config.lora.dropout}, which compiled blocks under plan.recompute full cannot have; "
            f"leave out --compile or the dropout, or give --plan.recompute selective"
        )
    if config.lora.rank == 0 and (changed := changed_option(config.lora)):
        raise ValueError(
            f"lora.{changed} is {getattr(config.lora, changed)}, but lora.rank is 0, which trains all weights; give "
            f"--lora.rank too"
        )
    of_model = [name for name in ("reference_from", "reference_zero") if getattr(config, name) is not None]
    of_model += ["reference_mesh"] if changed_option(config.reference_mesh) else []
    for name in (*(["reference"] if config.reference else []), *of_model):
        if reference_of(config) is None:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but task {config.task} has no reference; give --task dpo or "
                f"--task kto, or leave it out"
            )
    if config.reference == "adapters" and config.lora.rank == 0:
        raise ValueError("reference is adapters, the model without its adapters, but lora.rank is 0; give --lora.rank")
    if of_model and reference_of(config) == "adapters":
        raise ValueError(
            f"{of_model[0]} is {getattr(config, of_model[0])}, an option of a reference model, but reference is "
            f"{reference_of(config)}; give --reference model, or leave it out"
        )


def check_loss_options(task: str, dpo: DPOConfig, kto: KTOConfig) -> None:
    """Raise ValueError for an option of a loss that is not the task's."""
    for name, options in (("dpo", dpo), ("kto", kto)):
        if task != name and (changed := changed_option(options)):
            raise ValueError(
                f"{name}.{changed} is {getattr(options, changed)}, but task is {task}; give --task {name}, or leave it "
                f"out"
            )


def reference_of(config: Any) -> ReferenceKind | None:
    """Where the reference's log-probabilities come from; None for a task without. config: a `TrainConfig`."""
    if config.task not in ("dpo", "kto"):
        return None
    if config.reference is not None:
        chosen: ReferenceKind = config.reference
        return chosen
    return "adapters" if config.lora.rank and config.reference_from is None else "model"


def reference_axes(config: Any, axes: Mapping[str, int]) -> dict[str, int]:
    """The sizes pp, dp, cp and tp of the reference model's mesh. config: a `TrainConfig`. axes: of the run's mesh.

    Raises ValueError for a mesh with more or fewer processes than the run.
    """
    sizes = {axis: getattr(config.reference_mesh, axis) or axes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    count, processes = math.prod(sizes.values()), math.prod(axes.values())
    if count != processes:
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"reference_mesh is {shown}, {count} processes, but the run has {processes}; give sizes with this product"
        )
    return sizes


def changed_option(config: Any) -> str | None:
    """The first field that differs from its default; None if none does."""
    return next((each.name for each in fields(config) if getattr(config, each.name) != each.default), None)
