"""Experts on a mesh of their own: a second mesh over the ranks of a stage, with an axis "ep" that shards experts.

`hook_experts` replaces the forward of a model's modules of experts: each rank computes its own experts, on tokens of
all ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels.extension import apply_function, cast_for
from weft.mesh import Layout, LayoutError, Partial, Placement, ProcessMesh, Replicate, Shard
from weft.reshard import layout_of, reshard
from weft.reshard.extension import between_graphs, group_for, memory_of, shape_of, this_rank

from ...checks import divisors
from ...plan_options import TokenTransport
from ..plan import ExpertPlan
from ..resolve import ModulePlan, holder_of
from ..styles import DATA_AXIS, EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, TOKENS_DIM, ExpertParallel, is_data_axis
from .passage import LocalParameters, Passage, TokenLayouts, as_rows
from .transport import LINKS, Exchanging, ExpertRanks, Gathering, Price, Transport, price_of


def folded_axes(mesh: ProcessMesh, plan: ExpertPlan) -> tuple[str, ...]:
    """The axes of a model's mesh that together become "dp" x "ep": the data axes and "cp"; with `over_tp` also "tp"."""
    excluded = (PIPELINE_AXIS,) if plan.over_tp else (PIPELINE_AXIS, TENSOR_AXIS)
    return tuple(axis for axis in mesh.axis_names if axis not in excluded)


@lru_cache(maxsize=1024)
def experts_mesh(mesh: ProcessMesh, plan: ExpertPlan) -> ProcessMesh:
    """The mesh of the experts over the ranks of `mesh`: axes "dp", "ep", then the axes not in `folded_axes`.

    The ranks along "dp" hold the same experts. The ranks along "ep" are neighbors in `mesh`.
    mesh: of a pipeline stage, without "pp".
    Raises ValueError where the size of "ep" does not divide the number of ranks over `folded_axes`.
    """
    folded = folded_axes(mesh, plan)
    ranks = math.prod(map(mesh.axis_size, folded))
    if ranks % plan.size:
        sizes = " x ".join(f"{axis}={mesh.axis_size(axis)}" for axis in folded) or "no axis of data"
        remedy = "" if plan.over_tp or TENSOR_AXIS not in mesh.axis_names else ", or fold tp in: over_tp=True"
        raise ValueError(
            f"ep={plan.size} does not divide the {ranks} rank{'s' if ranks > 1 else ''} of {sizes}, over which "
            f"experts are sharded; sizes that do: {', '.join(map(str, divisors(ranks)))}{remedy}"
        )
    remaining = [axis for axis in mesh.axis_names if axis not in folded]
    together = mesh.permute(*folded, *remaining).flatten(folded, into="folded")
    return together.unflatten("folded", **{DATA_AXIS: ranks // plan.size, EXPERT_AXIS: plan.size})


def find_expert_plans(module_plans: Sequence[ModulePlan]) -> dict[str, ExpertPlan]:
    """{module name: plan} of the modules of experts to shard over "ep".

    A module counts if its style is `ExpertParallel`, in a plan whose `experts` has size 2 or more.
    Raises ValueError for a plan with `experts` of size 2 or more and no module of this style.
    """
    found: dict[str, ExpertPlan] = {}
    for module_plan in module_plans:
        plan = module_plan.plan.experts
        if plan is None or plan.size == 1:
            continue
        names = [name for name, style in module_plan.styles.items() if isinstance(style, ExpertParallel)]
        if not names:
            raise ValueError(
                f"the plan has experts={plan!r}, but gives no module the style ExpertParallel(): a model without "
                f"mixtures of experts has none to shard; leave experts out"
            )
        found |= dict.fromkeys(names, plan)
    return found


def check_experts(model: nn.Module, mesh: ProcessMesh, module_plans: Sequence[ModulePlan]) -> None:
    """Raises ValueError where the size of "ep" does not divide the ranks of the mesh, or the experts of a module.

    Called by `parallelize` before the model is changed or a process group is used. mesh: the model's, with "pp".
    """
    if PIPELINE_AXIS in mesh.axis_names:
        mesh = mesh.select(**{PIPELINE_AXIS: 0}) if mesh.ndim > 1 else ProcessMesh([mesh.ranks[0]], [DATA_AXIS])
    for name, plan in find_expert_plans(module_plans).items():
        experts_mesh(mesh, plan)
        for leaf, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if parameter.shape[0] % plan.size:
                raise ValueError(
                    f"ep={plan.size} does not divide the {parameter.shape[0]} experts of {name}.{leaf}; sizes that "
                    f"do: {', '.join(map(str, divisors(parameter.shape[0])))}"
                )


def expert_meshes(mesh: ProcessMesh, module_plans: Sequence[ModulePlan]) -> dict[str, ProcessMesh]:
    """{module name: the experts' mesh} of the modules of experts to shard over "ep". mesh: of a pipeline stage."""
    return {name: experts_mesh(mesh, plan) for name, plan in find_expert_plans(module_plans).items()}


def expert_layout(mesh: ProcessMesh, in_expert: Mapping[str, Placement]) -> Layout:
    """The layout of a parameter [E, ...] of experts: dim 0 sharded over "ep", the further dims as `in_expert` says.

    mesh: the experts'. in_expert: {axis: placement} from the parameter's style; axes outside the mesh are left out.
    """
    placements = {axis: placement for axis, placement in in_expert.items() if axis in mesh.axis_names}
    return Layout(mesh, {EXPERT_AXIS: Shard(0), **placements})


BETWEEN_GRAPHS = between_graphs(
    "tokens move between the ranks of 'ep', by counts read on the host; compile the block without fullgraph"
)


def hook_experts(model: nn.Module, mesh: ProcessMesh, module_plans: Sequence[ModulePlan]) -> None:
    """Replace the forward of each module of experts that is sharded over "ep". Called by `parallelize`.

    mesh: of the model, or of a pipeline stage. The original forward takes tokens [n, H], chosen experts [n, k] and
    weights [n, k]. The new forward takes DTensors, and calls the original forward twice, on local tensors: for this
    rank's tokens, and for received tokens. During these calls the module's parameters are local, and experts are
    numbered from the rank's first; choices of remote experts are `NO_EXPERT`.
    A compiled block runs the module between two graphs, so `block.compile(fullgraph=True)` raises torch's Unsupported.
    Communication: here, making the group along "ep". In each call: the exchange of the counts of tokens, where tokens
    are exchanged; as `Passage`; and reshards of tokens that are replicated over any of `folded_axes`.
    """
    for name, plan in find_expert_plans(module_plans).items():
        module = model.get_submodule(name)
        calls = _ExpertCalls(mesh, plan, "rows" in inspect.signature(module.forward).parameters)
        if this_rank() in mesh:
            calls.group()
        module.forward = partial(_forward, calls, module, module.forward)
        if hasattr(module, "announce_choices"):
            module.announce_choices = partial(_announce_choices, calls, module)  # type: ignore[assignment]


@dataclass(slots=True, eq=False)
class _ExpertCalls:
    """The state of a hooked module of experts, kept from call to call."""

    mesh: ProcessMesh  # of the model, or of a pipeline stage
    plan: ExpertPlan
    takes_rows: bool  # whether the original forward takes `rows`: the most choices of the tokens that are local experts
    # Started by `_announce_choices` for the next `_forward`; None where `_forward` starts the exchange, or gathers.
    early_exchange: Exchanging | None = field(default=None, init=False)

    def group(self) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """The process group along "ep", and the ranks in their order on the axis. The first call makes the group.

        The group is used for tokens only: a group shared with gradient sums would make tokens wait.
        """
        own = experts_mesh(self.mesh, self.plan).submesh(this_rank(), EXPERT_AXIS)
        assert own is not None, "a rank outside the mesh moves no tokens"
        return group_for("tokens of experts", tuple(sorted(own)), (EXPERT_AXIS,)), own.ranks

    def members(self, layout: Layout, shape: tuple[int, ...], experts: int) -> ExpertRanks:
        """The ranks along "ep" for a call. layout, shape: of the tokens [..., H]. experts: the number on all ranks."""
        group, ranks = self.group()
        return ExpertRanks(
            group=group,
            positions=_positions(ranks),
            ranks=ranks,
            position=ranks.index(this_rank()),
            tokens=tuple(math.prod(layout.local_shape(shape, rank)[:-1]) for rank in ranks),
            experts=experts // self.plan.size,
        )

    def transport(self, members: ExpertRanks, x: DTensor, experts_per_token: int) -> TokenTransport:
        """Whether tokens are exchanged or gathered: the plan's choice, or the cheaper. x: tokens [..., H]."""
        return self.plan.tokens or self.price(members, x, experts_per_token).cheaper

    def price(self, members: ExpertRanks, x: DTensor, experts_per_token: int) -> Price:
        """The price of both transports for tokens x [..., H]."""
        return price_of(
            size=members.size,
            tokens=max(members.tokens),
            hidden_size=int(x.shape[-1]),
            num_experts=members.experts * members.size,
            experts_per_token=experts_per_token,
            itemsize=x.element_size(),
            link=LINKS.get(x.device_mesh.device_type, LINKS["cpu"]),
        )


@BETWEEN_GRAPHS
def _announce_choices(calls: _ExpertCalls, module: nn.Module, x: Any, experts: Any) -> None:
    """`Experts.announce_choices` of sharded experts, called by `MixtureOfExperts`.

    Starts to exchange counts ahead of `_forward`. Only for tokens that are exchanged, and only where `_forward` needs
    no reshard of tokens first.
    """
    calls.early_exchange = None
    if not isinstance(x, DTensor) or this_rank() not in layout_of(x).mesh:
        return
    layout = layout_of(x)
    splits = TENSOR_AXIS in experts_mesh(calls.mesh, calls.plan).axis_names
    if (splits and layout[TENSOR_AXIS] != Replicate()) or _token_layouts(layout, calls.plan).tokens != layout:
        return
    num_experts = int(next(iter(module.parameters())).shape[0])
    transport = _begin(calls, calls.members(layout, shape_of(x), num_experts), x, as_rows(memory_of(experts)))
    calls.early_exchange = transport if isinstance(transport, Exchanging) else None


@BETWEEN_GRAPHS
def _forward(
    calls: _ExpertCalls, module: nn.Module, forward: Callable[..., Tensor], x: Any, experts: Any, weights: Any
) -> Tensor:
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"experts sharded over {EXPERT_AXIS!r} were called with plain tokens {tuple(x.shape)}; call the model with "
            f"tokens laid out by lay_out_batch or distribute, or give the module DTensors"
        )
    original = layout_of(x)
    if this_rank() not in original.mesh:
        return x
    x = cast_for("experts", x)  # moves as few bytes as the products take
    layouts = _token_layouts(original, calls.plan)
    if layouts.tokens != original:
        x, experts, weights = (reshard(each, placements=layouts.tokens) for each in (x, experts, weights))
    parameters: dict[str, Any] = dict(module.named_parameters())
    num_experts = int(next(iter(parameters.values())).shape[0])
    members = calls.members(layouts.tokens, shape_of(x), num_experts)
    local_experts = as_rows(memory_of(experts))
    transport, calls.early_exchange = calls.early_exchange or _begin(calls, members, x, local_experts), None
    if isinstance(transport, Exchanging):
        transport.read()
    locals_ = apply_function(LocalParameters, *parameters.values())
    swapped = [holder_of(module, name) for name in parameters]

    def compute(tokens: Tensor, local: Tensor, own_weights: Tensor, rows: int | None) -> Tensor:
        for (owner, leaf), tensor in zip(swapped, locals_, strict=True):
            owner._parameters[leaf] = tensor
        try:
            return forward(tokens, local, own_weights, **({"rows": rows} if calls.takes_rows else {}))
        finally:
            for (owner, leaf), parameter in zip(swapped, parameters.values(), strict=True):
                owner._parameters[leaf] = parameter

    output = Passage(transport, members, layouts, shape_of(x)).run(x, local_experts, weights, compute)
    back = {axis: original[axis] for axis in folded_axes(original.mesh, calls.plan)}
    return reshard(output, placements=layouts.output.replace(**back)) if layouts.tokens != original else output


def _begin(calls: _ExpertCalls, members: ExpertRanks, x: DTensor, experts: Tensor) -> Transport:
    choices = experts.shape[-1]
    if calls.transport(members, x, choices) == "gather":
        return Gathering(members, choices)
    return Exchanging(members, experts)


@lru_cache(maxsize=1024)
def _positions(ranks: tuple[int, ...]) -> Sequence[int]:
    """For each of the group's ranks, in ascending order, the rank's index in `ranks`. A range if `ranks` ascends."""
    positions = [ranks.index(rank) for rank in sorted(ranks)]
    return range(len(ranks)) if positions == [*range(len(ranks))] else positions


@lru_cache(maxsize=1024)  # few layouts, looked up in every call
def _token_layouts(original: Layout, plan: ExpertPlan) -> TokenLayouts:
    """The layouts of a call. original: of the tokens [B, T, H] given by the caller.

    Each of `folded_axes` must shard the tokens. A replicated data axis is made to shard rows; "cp" or "tp" is
    made to shard the tokens of a row. Raises LayoutError where an axis shards features, or tokens are partial sums.
    """
    mesh, sharded = original.mesh, {}
    for axis in folded_axes(mesh, plan):
        placement = original[axis]
        if placement == Replicate():
            sharded[axis] = Shard(0) if is_data_axis(axis) else Shard(TOKENS_DIM)
        elif not isinstance(placement, Shard) or placement.dim > TOKENS_DIM:
            raise LayoutError(
                f"experts take tokens [B, T, H] sharded over rows or tokens, and these are ({original}); reshard "
                f"{axis!r} to S(0), S(1) or R"
            )
    tokens = original.replace(**{axis: each for axis, each in sharded.items() if mesh.axis_size(axis) > 1})
    splits = TENSOR_AXIS in mesh.axis_names and not plan.over_tp and mesh.axis_size(TENSOR_AXIS) > 1
    if splits and tokens[TENSOR_AXIS] != Replicate():
        raise LayoutError(
            f"each expert is split over {TENSOR_AXIS!r}, so its tokens must be replicated over {TENSOR_AXIS!r}, and "
            f"these are ({original}); give the module the style ExpertParallel()"
        )
    partial_over = {TENSOR_AXIS: Partial()} if splits else {}
    output = tokens.replace(**partial_over)
    return TokenLayouts(tokens=tokens, output=output, gradient=output)
