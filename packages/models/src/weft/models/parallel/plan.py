"""A parallel plan: how a module tree is laid out, as a value of wildcard names and styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from ..schedules.plan import PipelinePlan
from .styles import Preparation, Style, as_styles

Context = Literal["all_gather", "ulysses"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How a model is laid out on a mesh.

    tensor: module names with wildcards, as in "layers.*.mlp.up_proj", and the style of each, along the axis "tp"; or several
        styles, of which one says how parameters lie and others prepare inputs and outputs. "" is the model itself.
    sequence: between the parallel layers the activations are sharded on the tokens (dim 1) over "tp": the all-reduces
        become reduce-scatter and all-gather pairs at the same places; nothing else need be said.
    context: tokens that are sharded over "cp" attend to those of all ranks: "all_gather" gathers their keys and values,
        "ulysses" (Jacobs et al. 2023) brings queries, keys and values from tokens to heads, and the output back; None takes
        no tokens that are sharded so.
    pipeline: how the model is cut along the axis "pp", and the order in which microbatches go through its stages.
    loss_parallel: the logits stay sharded on the vocabulary, for a loss that takes them so.
    recompute: what backward computes again in place of keeping it, block by block: "full", each block; "selective", all but
        its products by weights and what was communicated. The bits are the same.
    blocks: names of the blocks, with wildcards; of modules that lie within one another the outermost.
    zero: sharded optimizers (Rajbhandari et al. 2020). From 1 on parameters, and so what an optimizer keeps for them, lie on shards
        over the axes of data, and are gathered by every forward pass, or once for all microbatches of `forward_backward`; with 2
        gradients are never added up whole, so that every backward pass communicates; with 3 a block's parameters are gathered before
        it computes, dropped after, and gathered again in backward; those of a pipeline's stage once a step, dropped when all
        microbatches are back.
    zero_over: the axes of data to shard over; all that the mesh has, as "dp" and "cp", where None.
    regather: with zero=3, False keeps what forward gathered for backward.
    parts: the plans of models within the model, by the names of their modules; see `merge`.
    Raises ValueError for what is no style or option, and for parts beside anything else.
    """

    tensor: Mapping[str, Style | Preparation | Sequence[Style | Preparation]] = field(default_factory=dict)
    sequence: bool = False
    context: Context | None = None
    pipeline: PipelinePlan | None = None
    loss_parallel: bool = True
    recompute: Recompute = "none"
    blocks: tuple[str, ...] = ("layers.*",)
    zero: Literal[0, 1, 2, 3] = 0
    zero_over: Sequence[str] | None = None
    regather: bool = True
    parts: Mapping[str, ParallelPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context is not None and self.context not in get_args(Context):
            raise ValueError(
                f"ParallelPlan: context is {self.context!r}; it must be None or one of {', '.join(map(repr, get_args(Context)))}"
            )
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"ParallelPlan: recompute is {self.recompute!r}; it must be one of {', '.join(map(repr, get_args(Recompute)))}"
            )
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"ParallelPlan: zero is {self.zero!r}; it must be 0, 1, 2 or 3")
        if isinstance(self.zero_over, str) or (self.zero_over is not None and not self.zero_over):
            raise ValueError(
                f"ParallelPlan: zero_over is {self.zero_over!r}; give the names of axes, as ('dp',), or None"
            )
        if self.zero_over is not None:
            object.__setattr__(self, "zero_over", tuple(self.zero_over))
        for pattern, given in self.tensor.items():
            as_styles(pattern, given)
        if not self.parts:
            return
        for each in fields(self):
            default = each.default if each.default_factory is not dict else {}
            if each.name != "parts" and getattr(self, each.name) != default:
                raise ValueError(
                    f"a plan of parts was given {each.name}={getattr(self, each.name)!r} beside them; give it to the parts "
                    f"that it is for, {', '.join(map(repr, self.parts))}: the model's own is the part ''"
                )

    @classmethod
    def merge(cls, plans: Mapping[str, ParallelPlan]) -> ParallelPlan:
        """The plan of a model that contains models, each of which keeps its own plan: `merge({"vision": a, "text": b})`.

        plans: by the name of the module that holds the model, or a pattern of such names; "" is the model itself. The names
            in a plan count from that module, and its options (sequence, loss_parallel, …) hold within it, whatever those of
            the others are. What two of them say of one module must be the same.
        Raises ValueError for no plans, or what is none; `parallelize`, which knows the model, for a name that it has not, and for
        two plans that contradict each other, naming both.
        """
        if not plans:
            raise ValueError('ParallelPlan.merge was given no plans; give them by module: {"vision": …, "text": …}')
        for prefix, plan in plans.items():
            if not isinstance(prefix, str) or not isinstance(plan, cls):
                raise ValueError(
                    f"ParallelPlan.merge was given {prefix!r}: {plan!r}; give the ParallelPlan of each module by its name"
                )
        return cls(parts=dict(plans))

    def __str__(self) -> str:
        if self.parts:
            return "\n\n".join(f"[{prefix}]\n{plan}" for prefix, plan in self.parts.items())
        lines = [f"{pattern}: {_shown(style)}" for pattern, style in self.tensor.items()]
        others = [each.name for each in fields(self) if each.name not in ("tensor", "parts")]
        return "\n".join([*lines, *(f"{name}: {_words(getattr(self, name))}" for name in others)])


def _words(option: object) -> str:
    return ", ".join(option) if isinstance(option, tuple) else str(option)


def pipeline_plan(plan: ParallelPlan) -> PipelinePlan | None:
    """How the whole model is cut: of a merged plan, what that of the model itself says."""
    own = plan.parts.get("")
    return pipeline_plan(own) if own is not None else plan.pipeline


def without_pipeline(plan: ParallelPlan) -> ParallelPlan:
    """The plan of a stage."""
    if plan.parts:
        return replace(plan, parts={name: without_pipeline(part) for name, part in plan.parts.items()})
    return replace(plan, pipeline=None)


def _shown(style: object) -> str:
    return ", ".join(map(repr, style)) if isinstance(style, Sequence) else repr(style)
