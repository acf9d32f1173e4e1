"""`ParallelPlan`: how a model is laid out on a mesh, as styles for wildcard module names and a few options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from ..checks import check_kinds
from ..exact import check_parts, check_sizes
from ..plan_options import Context, Recompute, TokenTransport, Zero
from ..schedules.pipeline_plan import PipelinePlan
from .styles import TENSOR_AXIS, Preparation, Style, as_styles


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How the experts of mixtures are sharded over ranks, and how tokens reach the experts: `ParallelPlan.experts`.

    Raises ValueError for a size below 1, and for an unknown value of tokens.
    """

    #: size of the axis "ep": each rank along "ep" holds 1 / size of the experts. The axis adds no ranks; the ranks of
    #: dp x cp are divided into dp x ep.
    size: int = 1
    #: divide the ranks of dp x cp x tp instead. Experts are then whole on a rank, instead of split over "tp".
    over_tp: bool = False
    #: "exchange" sends a token once to each rank with any of the token's experts; the host reads the counts from the
    #: device once a layer. "gather" brings all tokens to every rank along "ep"; the host never waits. None takes the
    #: cheaper by experts/transport.py.
    tokens: TokenTransport | None = None

    def __post_init__(self) -> None:
        check_kinds(None, self)
        if self.size < 1:
            raise ValueError(f"ExpertPlan: size is {self.size}; it must be 1 or more")

    @property
    def folds_tensor_axis(self) -> bool:
        """Whether the ranks along "tp" are among the ranks divided into dp x ep."""
        return self.over_tp and self.size > 1

    def __str__(self) -> str:
        over = "dp x cp x tp" if self.over_tp else "dp x cp"
        return f"ep={self.size} over {over}, tokens by {self.tokens or 'price'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How a model is laid out on a mesh; `parallelize` carries the plan out.

    A model's `parallel_plan()` makes the usual plan; `dataclasses.replace` changes options.
    Raises ValueError for a value of a wrong type, for an unknown option, and for `parts` together with a further field.
    """

    #: for each module name, wildcards allowed ("layers.*.mlp.up_proj"), the style along the axis "tp", or several
    #: styles: a style for the parameters, and preparations of inputs and outputs. "" names the model itself.
    tensor: Mapping[str, Style | Preparation | Sequence[Style | Preparation]] = field(default_factory=dict)
    #: shard the activations between tensor-parallel layers along the tokens (dim 1) over "tp". Each all-reduce becomes
    #: a reduce-scatter and an all-gather at the same place.
    sequence: bool = False
    #: how tokens sharded over "cp" attend to the tokens of all ranks. "all_gather" gathers keys and values. "ulysses"
    #: (Jacobs et al. 2023) exchanges shards of tokens for shards of heads, for queries, keys and values, and back for
    #: the output. With None, tokens sharded over "cp" are refused.
    context: Context | None = None
    #: by attention layer of the model, None for a layer without a window; () for a model without windows. With
    #: context="all_gather", `lay_out_batch` balances the work of all layers together. `parallel_plan()` sets windows.
    windows: tuple[int | None, ...] = ()
    #: how the model is cut along the axis "pp", and in which order microbatches go through the stages. None: not cut.
    pipeline: PipelinePlan | None = None
    loss_parallel: bool = True  #: leave the logits sharded on the vocabulary, for a loss on sharded logits
    #: the activations that forward drops and backward computes again, block by block. "full": the whole block;
    #: "selective": all but products by weights and the results of communication. Numbers keep their bits.
    recompute: Recompute = "none"
    #: the names of the blocks, wildcards allowed; of nested matching modules, the outermost
    blocks: tuple[str, ...] = ("layers.*",)
    #: sharded optimizers (Rajbhandari et al. 2020). From 1 on, parameters and the optimizer's states are stored sharded
    #: over the data axes; every forward pass gathers the parameters, or `forward_backward` once for all microbatches.
    #: With 2, gradients are never added up in full size: every backward pass communicates. With 3, a block's parameters
    #: are gathered before the block computes, freed after, and gathered again in backward; a pipeline stage's
    #: parameters are gathered once a step and freed when all microbatches are done.
    zero: Zero = 0
    #: the data axes to shard over; None for all data axes of the mesh, as "dp" and "cp"
    zero_over: Sequence[str] | None = None
    regather: bool = True  #: with zero=3, False keeps the gathered parameters from forward to backward
    #: how experts are sharded over "ep". None leaves experts on the model's own mesh: replicated over the data axes,
    #: and split over "tp" by the style `ExpertParallel`.
    experts: ExpertPlan | None = None
    #: the sizes of a named mesh, as {"dp": 4, "tp": 2}. Numbers are added as on the named mesh. Losses, gradients and
    #: weights then have equal bits on every mesh whose "dp" and "tp" divide the named sizes, with the named "cp", under
    #: any pipeline and recompute, and with one microbatch under any zero. Sizes are powers of two; "dp", "cp" and "tp"
    #: can be named, and an axis left out has size 1. `sequence` is set where "tp" is above 1. A mesh or option that
    #: would change the bits is refused, here or by `parallelize`. None: numbers are added as the mesh of the run adds
    #: them.
    exact: Mapping[str, int] | None = None
    #: the plans of models within the model, by module name; see `merge`
    parts: Mapping[str, ParallelPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kinds(None, self)
        if isinstance(self.zero_over, str) or (self.zero_over is not None and not self.zero_over):
            raise ValueError(
                f"ParallelPlan: zero_over is {self.zero_over!r}; give the names of axes, as ('dp',), or None"
            )
        if self.zero_over is not None:
            object.__setattr__(self, "zero_over", tuple(self.zero_over))
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"ParallelPlan: windows is {self.windows!r}; give each layer's window, 1 or more, or None")
        if self.exact is not None:
            check_sizes(self.exact)
            if self.exact.get(TENSOR_AXIS, 1) > 1:
                object.__setattr__(self, "sequence", True)
        for pattern, styles in self.tensor.items():
            as_styles(pattern, styles)
        if not self.parts:
            return
        for each in fields(self):
            default = each.default if each.default_factory is not dict else {}
            if each.name != "parts" and getattr(self, each.name) != default:
                raise ValueError(
                    f"a merged plan was given {each.name}={getattr(self, each.name)!r} beside its parts; set "
                    f"{each.name} in the plans of parts, among {', '.join(map(repr, self.parts))} (the part '' is "
                    f"the model itself)"
                )
        check_parts({name: exact_of(part) for name, part in self.parts.items()})

    @classmethod
    def merge(cls, plans: Mapping[str, ParallelPlan]) -> ParallelPlan:
        """Combine the plans of models within a model: `merge({"vision": a, "text": b})`.

        plans: {module name, or pattern of names: plan of the model in this module}; "" is the outer model itself. Names
            in a plan are relative to the plan's module. Options (sequence, loss_parallel, …) hold within the module
            only. Two plans for a module must agree.
        Raises ValueError for an empty mapping, and for a value that is no plan. `parallelize`, which knows the model,
        raises ValueError for an unknown name, and for contradicting plans, naming both.
        """
        if not plans:
            raise ValueError('ParallelPlan.merge was given no plans; give them by module: {"vision": …, "text": …}')
        for prefix, plan in plans.items():
            if not isinstance(prefix, str) or not isinstance(plan, cls):
                raise ValueError(
                    f"ParallelPlan.merge was given {prefix!r}: {plan!r}; give the ParallelPlan of each module by the "
                    f"module's name"
                )
        return cls(parts=dict(plans))

    def __str__(self) -> str:
        if self.parts:
            return "\n\n".join(f"[{prefix}]\n{plan}" for prefix, plan in self.parts.items())
        lines = [f"{pattern}: {_shown(style)}" for pattern, style in self.tensor.items()]
        options = [each.name for each in fields(self) if each.name not in ("tensor", "parts", "windows")]
        return "\n".join([*lines, *(f"{name}: {_words(getattr(self, name))}" for name in options)])


def _words(option: object) -> str:
    return ", ".join(option) if isinstance(option, tuple) else str(option)


def pipeline_plan(plan: ParallelPlan) -> PipelinePlan | None:
    """The plan's `pipeline` for the whole model; for a merged plan, the `pipeline` of the part ""."""
    own = plan.parts.get("")
    return pipeline_plan(own) if own is not None else plan.pipeline


def exact_of(plan: ParallelPlan) -> Mapping[str, int] | None:
    """The plan's `exact` for the whole model; for a merged plan, the `exact` of the part ""."""
    own = plan.parts.get("")
    return exact_of(own) if own is not None else plan.exact


def without_pipeline(plan: ParallelPlan) -> ParallelPlan:
    """The plan by which each stage is laid out: without pipeline, in the parts, too."""
    if plan.parts:
        return replace(plan, parts={name: without_pipeline(part) for name, part in plan.parts.items()})
    return replace(plan, pipeline=None)


def _shown(style: object) -> str:
    return ", ".join(map(repr, style)) if isinstance(style, Sequence) else repr(style)
