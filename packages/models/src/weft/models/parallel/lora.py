"""`lora`: trainable low-rank adapters beside a model's frozen linear layers and experts (Hu et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of, reshard
from weft.reshard.extension import layout_in_call, local_of, this_rank, wrap

from ..experts import Experts
from ..initialization import Constant, Initial, Normal, fill
from ..low_rank import Adapter, LowRank, LowRankExperts, StackedLowRank, adapted_parameter
from .lora_targets import AdapterPlace, check_dropout, find_places, hand_keys, take_keys_back
from .parallelize import pipeline_of
from .parameter_layouts import adapter_layout
from .resolve import holder_of

_ATTRIBUTE = "_lora"  # of an adapted model: a `LoRA`, copied with the model


@dataclass(frozen=True, slots=True)
class LoRA:
    """The options of a model's adapters, and the adapters' names. Made by `lora`, found by `lora_of`."""

    rank: int
    alpha: float
    adapters: dict[str, str]  # {layer or projection of experts: name of the `Adapter`}
    trained: frozenset[str]  # the names of the parameters that required gradients before `lora`
    dropout: float = 0.0  # of the adapters' inputs


def lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    dropout: float = 0.0,
) -> nn.Module:
    """Add adapters beside the layers and experts named by `targets`; from then on only the adapters are trained.

    Returns `model` itself. A target's output gets alpha / rank * (x @ A.T) @ B.T added, with parameters `lora.A`
    [rank, in_features] and `lora.B` [out_features, rank]. For a projection of E experts each expert has an adapter of
    its own: the parameters of `experts.gate_proj` are `experts.lora.gate_proj.A` [E, rank, in_features] and `.B`
    [E, out_features, rank]. A is drawn from (seed, name), normal with variance 1 / (3 * in_features), which is the
    variance of `peft`'s uniform start; B is 0. `initialize` draws the same values. On the meta device A and B are left
    for `initialize` to fill.
    rank: 1 or more.
    alpha: above 0.
    targets: names of linear layers and of experts' projections, wildcards allowed, as "layers.*.self_attn.[qv]_proj"
        and "layers.*.mlp.experts.*_proj". "*_proj" matches every projection of attention, MLPs and experts. A pattern
        without a dot that matches no whole name is compared with the last part of names, as in peft: "q_proj" matches
        the projection of queries in every layer.
    dtype: of A and B. None: the layer's own, but float32 beside a layer of 16 bits, in which small updates
        would be lost. A layer of a narrower dtype than the adapter's computes with the adapter in the adapter's
        dtype, and returns the layer's dtype.
    dropout: the probability with which an element of an adapter's input is zeroed while training, as in peft; the
        layer itself reads the whole input. The model is then called with a `dropout_key`. Masks are a function of
        (key, the adapter's name, element), the same on every mesh. Not for adapters of experts.
    May be called before or after `parallelize`. A and B are laid out by the layer's weight: beside a
    column-parallel layer A is replicated and B S(0), beside a row-parallel layer A is S(1) and B replicated. Adapters
    of experts are sharded over "ep" as the experts are. A block's forward and backward communicate as without adapters.
    A `GradientSync` made afterwards reduces the adapters' gradients only, over "tp" those of replicated A and B.
    Communication: none.
    Raises ValueError for a rank, alpha or dropout out of range; for a dtype other than a floating-point dtype of 16
    bits or more; for a target matching nothing, a module other than a linear layer, a layer whose weight is tied to
    another module's, or experts whose class has a forward of its own; for dropout of an adapter of experts, and of a
    layer in no module that takes `dropout_key`; for a model with adapters; for a model cut into stages, which needs
    its adapters before `parallelize`.
    """
    _check(model, rank, alpha, dtype)
    places = find_places(model, targets)
    check_dropout(model, dropout, places)
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    model.requires_grad_(False)
    for place in places:
        adapter = _attach(place, _make_factors(place.owner, place.leaf, rank, dtype), alpha, dropout)
        for leaf, parameter in adapter.named_parameters():
            if not parameter.is_meta:
                fill(f"{place.adapter}.{leaf}", parameter, _adapter_initial(leaf, parameter), seed)
    if dropout:
        hand_keys(model, [place.adapter for place in places])
    own: Any = getattr(model, "initial_value", None)
    if own is not None:
        model.initial_value = partial(_initial_value, model, own)  # type: ignore[assignment]
    adapters = {place.target: place.adapter for place in places}
    setattr(model, _ATTRIBUTE, LoRA(rank, alpha, adapters, trained, dropout))
    return model


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within the context, a model with adapters computes as its base, with the same bits.

    Nothing is copied, and no memory is used. Works on one process and under every plan, in pipelines, with
    recomputation, and with blocks compiled by torch.compile, which are compiled once more at their first call within
    the context. Compiled blocks equal the compiled base within rounding. Run the backward of a forward in the same
    context, too: backward may compute blocks again.
    Communication: none here; under ZeRO, a call gathers the adapters' parameters, too.
    Raises ValueError for a model without adapters.
    """
    adapters = lora_of(model).adapters.values()
    owners = dict.fromkeys(holder_of(model, adapted_parameter(adapter))[0] for adapter in adapters)
    was_active = {owner.lora: owner.lora.active for owner in owners}
    try:
        for adapter in was_active:
            adapter.active = False
        yield
    finally:
        for adapter, active in was_active.items():
            adapter.active = active


def merge_lora(model: nn.Module) -> nn.Module:
    """Add each adapter into the weight of the layer, and remove the adapter: undoes `lora`, but keeps the training.

    Parameters have the names, and require gradients, as before `lora`. Returns `model` itself.
    Communication: none, since each rank adds its own part; but adapters stored sharded are gathered.
    Raises ValueError for a model without adapters, or cut into stages.
    """
    adapters = lora_of(model)
    if pipeline_of(model) is not None:
        raise ValueError(
            "merge_lora: the model is cut into stages; save_pretrained(model, folder) on all ranks writes the model "
            "with its adapters folded in, and save_lora(model, folder) the adapters alone"
        )
    with torch.no_grad():
        for adapter in adapters.adapters.values():
            owner, leaf = holder_of(model, adapted_parameter(adapter))
            local_of(getattr(owner, leaf)).copy_(_merged_weight(owner, leaf, model.get_submodule(adapter)))
        if adapters.dropout:
            take_keys_back(model)
        for adapter in adapters.adapters.values():
            _detach(holder_of(model, adapted_parameter(adapter))[0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in adapters.trained)
    vars(model).pop("initial_value", None)
    delattr(model, _ATTRIBUTE)
    return model


def merged_parameter(model: nn.Module, name: str) -> Tensor:
    """The parameter of this name; beside an adapter, a copy with the adapter added, as by `merge_lora`.

    Communication: none, unless the adapter is stored sharded and must be gathered.
    """
    parameter = model.get_parameter(name)
    owner, leaf = holder_of(model, name)
    adapter = getattr(owner, "lora", None)
    if isinstance(adapter, LowRankExperts):
        adapter = getattr(adapter, leaf)
    elif leaf != "weight":
        return parameter
    if not isinstance(adapter, Adapter):
        return parameter
    with torch.no_grad():
        folded = _merged_weight(owner, leaf, adapter)
    return wrap(folded, layout_of(parameter), parameter.shape) if isinstance(parameter, DTensor) else folded


def adapter_names(model: nn.Module) -> set[str]:
    """The names of the adapters' parameters, of all stages; empty for a model without adapters."""
    adapters = getattr(model, _ATTRIBUTE, None)
    names = () if adapters is None else adapters.adapters.values()
    return {f"{adapter}.{leaf}" for adapter in names for leaf in "AB"}


def draw_adapters(model: nn.Module, seed: int) -> None:
    """Draw the start of the adapters on this rank, as `lora` and `initialize` do; nothing for a model without adapters.

    Called after base weights were loaded into a model on the meta device. Communication: none.
    """
    names = adapter_names(model)
    for name, parameter in model.named_parameters():
        if name in names:
            fill(name, parameter, _adapter_initial(name.rpartition(".")[2], parameter), seed)


def lora_of(model: nn.Module) -> LoRA:
    """The adapters of a model. Raises ValueError for a model without adapters."""
    adapters = getattr(model, _ATTRIBUTE, None)
    if not isinstance(adapters, LoRA):
        raise ValueError(
            f"this {type(model).__name__} has no adapters; add adapters by lora(model, rank, alpha, targets)"
        )
    return adapters


def _check(model: nn.Module, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
    if isinstance(getattr(model, _ATTRIBUTE, None), LoRA):
        raise ValueError(
            f"this {type(model).__name__} has adapters already; merge_lora(model) folds them in, and then new adapters "
            f"can be added"
        )
    if pipeline_of(model) is not None:
        raise ValueError(
            "lora: the model is cut into stages, of which this rank has some; add adapters before parallelize, which "
            "cuts the adapters, too"
        )
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"lora: rank is {rank!r}; it must be an int >= 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"lora: alpha is {alpha!r}; it must be a number > 0")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(
            f"lora: dtype is {dtype!r}; give torch.float32, torch.bfloat16 or another floating-point dtype, or None"
        )


def _make_factors(owner: nn.Module, leaf: str, rank: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A and B for a weight [..., out_features, in_features], with values unset."""
    weight: Tensor = getattr(owner, leaf)
    if dtype is None:
        dtype = weight.dtype if weight.dtype.itemsize >= torch.float32.itemsize else torch.float32
    *leading, outputs, inputs = weight.shape
    shapes = {"A": (*leading, rank, inputs), "B": (*leading, outputs, rank)}
    if not isinstance(weight, DTensor):
        return {name: weight.detach().new_empty(shape, dtype=dtype) for name, shape in shapes.items()}
    factors = {}
    for name, shape in shapes.items():
        layout = adapter_layout(layout_in_call(owner, leaf), name, weight.ndim)
        local = weight.to_local().new_empty(layout.local_shape(shape, this_rank()), dtype=dtype)
        factors[name] = wrap(local, layout, shape).detach()
    return factors


def _attach(place: AdapterPlace, factors: dict[str, Tensor], alpha: float, dropout: float) -> Adapter:
    """Attach an adapter with `factors` A and B as the layer's submodule `lora`, or within the experts' `lora`."""
    owner = place.owner
    if isinstance(owner, Experts):
        owner.lora = LowRankExperts() if owner.lora is None else owner.lora
        stacked = StackedLowRank(factors["A"], factors["B"], alpha)
        setattr(owner.lora, place.leaf, stacked)
        return stacked
    adapter: Any = LowRank(factors["A"], factors["B"], alpha, dropout, place.adapter).train(owner.training)
    owner.lora = adapter
    adapter.handle = owner.register_forward_hook(_adapt, prepend=True, with_kwargs=True)
    return adapter  # type: ignore[no-any-return]


def _detach(owner: Any) -> None:
    """Remove the adapters of a layer, or all adapters of a module of experts."""
    if isinstance(owner, Experts):
        owner.lora = None
    else:
        owner.lora.handle.remove()
        del owner.lora


def _adapt(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """Forward hook of a layer: adds the adapter's output. Runs before the hook that reduces the layer's output, if
    any. Leaves the output unchanged within `without_adapters`.
    """
    if not layer.lora.active:
        return None
    adapted: Tensor = layer.lora(args[0] if args else kwargs["input"], output)
    return adapted


def _adapter_initial(leaf: str, parameter: Tensor) -> Initial:
    return Constant(0.0) if leaf == "B" else Normal(1 / math.sqrt(3 * parameter.shape[-1]))


def _initial_value(model: nn.Module, own: Callable[[str], Initial], name: str) -> Initial:
    """`initial_value` of an adapted model. own: the model's own method, which knows no adapters."""
    if name not in adapter_names(model):
        return own(name)
    return _adapter_initial(name.rpartition(".")[2], model.get_parameter(name))


def _merged_weight(owner: nn.Module, leaf: str, adapter: Any) -> Tensor:
    """This rank's part of a weight with the adapter added. leaf: the weight's name in `owner`."""
    weight, a, b = local_of(getattr(owner, leaf)), _gather(adapter, "A"), _gather(adapter, "B")
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = adapter.scale * (b.to(wide) @ a.to(wide))
    return (weight.to(wide) + _stored_part(owner, leaf, product)).to(weight.dtype)


def _gather(adapter: nn.Module, leaf: str) -> Tensor:
    """This rank's part of an adapter's parameter, in the layout in which the parameter computes.

    Communication: an all-gather, where the parameter is stored sharded.
    """
    parameter = getattr(adapter, leaf).detach()
    return (
        reshard(parameter, placements=layout_in_call(adapter, leaf)).to_local()
        if isinstance(parameter, DTensor)
        else parameter
    )


def _stored_part(owner: nn.Module, leaf: str, product: Tensor) -> Tensor:
    """This rank's stored part of a weight's update. product: the update in the layout in which the weight computes.
    leaf: the weight's name in `owner`.
    """
    weight = getattr(owner, leaf)
    if not isinstance(weight, DTensor):
        return product
    update = wrap(product, layout_in_call(owner, leaf), weight.shape)
    return reshard(update, placements=layout_of(weight)).to_local()
