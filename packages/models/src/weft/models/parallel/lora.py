"""`lora`: trainable low-rank adapters beside a model's frozen linear layers (Hu et al. 2022)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of, reshard
from weft.reshard.extension import layout_in_call, this_rank, wrap

from ..experts import Experts
from ..initialization import Constant, Initial, Normal, fill
from ..low_rank import LowRank
from .parallelize import pipeline_of
from .parameter_layouts import adapter_layout
from .resolve import nearest

_EXPERTS_REMEDY = ": in a model with experts, those of attention, and the router, 'layers.*.mlp.gate'"
_ATTRIBUTE = "_lora"  # of an adapted model: a `LoRA`, copied with the model


@dataclass(frozen=True, slots=True)
class LoRA:
    """The adapters of a model. Made by `lora`, found by `lora_of`."""

    rank: int
    alpha: float
    layers: tuple[str, ...]  # the names of the layers with an adapter
    trained: frozenset[str]  # the names of the parameters trained before


def lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Add adapters beside the linear layers named by `targets`; from then on only the adapters are trained.

    Returns `model` itself. A target's output gets alpha / rank * (x @ A.T) @ B.T added, with parameters `lora.A`
    [rank, in_features] and `lora.B` [out_features, rank]. A is drawn from (seed, name), normal with variance 1 / (3
    * in_features), which is the variance of `peft`'s uniform start; B is 0. `initialize` draws the same values. On
    the meta device A and B are left for `initialize` to fill.
    rank: 1 or more.
    alpha: above 0.
    targets: names of layers, wildcards allowed, as "layers.*.self_attn.[qv]_proj".
    dtype: of A and B. By default the layer's own, but float32 beside a layer of 16 bits, in which small updates
        would be lost. A layer of a narrower dtype than the adapter's computes with the adapter in the adapter's
        dtype, and returns the layer's dtype.
    May be called before or after `parallelize`. A and B are laid out by the layer's weight: beside a
    column-parallel layer A is replicated and B S(0), beside a row-parallel layer A is S(1) and B replicated. A
    block needs no further reduction. A `GradientSync` made afterwards reduces the adapters' gradients only.
    Communication: none.
    Raises ValueError for a rank or alpha out of range; for a dtype other than a floating-point dtype of 16 bits or
    more; for a target matching nothing, a module other than a linear layer, or a layer whose weight is tied to
    another module's; for a model with adapters; for a model cut into stages, which needs its adapters before
    `parallelize`.
    """
    _check(model, rank, alpha, dtype)
    layers = _find_layers(model, targets)
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    model.requires_grad_(False)
    for name, layer in layers.items():
        layer.lora = _make_adapter(layer, rank, alpha, dtype)
        layer.lora.handle = layer.register_forward_hook(_adapt, prepend=True, with_kwargs=True)
        for leaf, parameter in layer.lora.named_parameters():
            if not parameter.is_meta:
                fill(f"{name}.lora.{leaf}", parameter, _adapter_initial(leaf, layer), seed)
    own: Any = getattr(model, "initial_value", None)
    if own is not None:
        model.initial_value = partial(_initial_value, model, own)  # type: ignore[assignment]
    setattr(model, _ATTRIBUTE, LoRA(rank, alpha, tuple(layers), trained))
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Add each adapter into the weight of its layer and remove the adapter. Names and trained parameters are as
    before `lora`.

    Returns `model` itself.
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
        for name in adapters.layers:
            layer: Any = model.get_submodule(name)
            _local(layer.weight).copy_(_merged_weight(layer))
            layer.lora.handle.remove()
            del layer.lora
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
    owner, _, leaf = name.rpartition(".")
    layer: Any = model.get_submodule(owner)
    if leaf != "weight" or not isinstance(getattr(layer, "lora", None), LowRank):
        return parameter
    with torch.no_grad():
        folded = _merged_weight(layer)
    return wrap(folded, layout_of(parameter), parameter.shape) if isinstance(parameter, DTensor) else folded


def adapter_names(model: nn.Module) -> set[str]:
    """The names of the adapters' parameters, of all stages; empty for a model without adapters."""
    adapters = getattr(model, _ATTRIBUTE, None)
    return {f"{layer}.lora.{leaf}" for layer in adapters.layers for leaf in "AB"} if adapters is not None else set()


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


def _find_layers(model: nn.Module, targets: Sequence[str]) -> dict[str, Any]:
    """The layers named by `targets`, in the model's order. Raises ValueError as `lora` does."""
    if isinstance(targets, str) or not targets:
        raise ValueError(
            f'lora: targets is {targets!r}; give names of layers in a list, as ["layers.*.self_attn.q_proj"]'
        )
    modules = {name: module for name, module in model.named_modules() if name}
    matching: set[str] = set()
    for pattern in targets:
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"LoRA target {pattern!r} matches no module of {type(model).__name__}; "
                f"{nearest(pattern, list(modules))}"
            )
        for name in names:
            if not isinstance(modules[name], nn.Linear):
                raise ValueError(
                    f"LoRA target {pattern!r} matches {name!r}, a {type(modules[name]).__name__}; adapters are for "
                    f"Linear layers{_EXPERTS_REMEDY if isinstance(modules[name], Experts) else ''}"
                )
        matching.update(names)
    layers = {name: module for name, module in modules.items() if name in matching}
    name_counts = Counter(each for _, each in model.named_parameters(remove_duplicate=False))
    for name, layer in layers.items():
        if name_counts[layer.weight] > 1:
            tied = [n for n, each in model.named_parameters(remove_duplicate=False) if each is layer.weight]
            raise ValueError(
                f"LoRA target {name!r} has a tied weight, {' and '.join(tied)}: folded in, its adapter would change "
                f"both; leave {name!r} out"
            )
    return layers


def _make_adapter(layer: Any, rank: int, alpha: float, dtype: torch.dtype | None) -> LowRank:
    """An adapter for `layer`, with values unset."""
    weight = layer.weight
    if dtype is None:
        dtype = weight.dtype if weight.dtype.itemsize >= torch.float32.itemsize else torch.float32
    shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
    if not isinstance(weight, DTensor):
        parts = {leaf: weight.new_empty(shape, dtype=dtype) for leaf, shape in shapes.items()}
    else:
        parts = {}
        for leaf, shape in shapes.items():
            layout = adapter_layout(layout_in_call(layer, "weight"), leaf)
            local = weight.to_local().new_empty(layout.local_shape(shape, this_rank()), dtype=dtype)
            parts[leaf] = wrap(local, layout, shape)
    return LowRank(parts["A"].detach(), parts["B"].detach(), alpha)


def _adapt(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """Forward hook of a layer: adds the adapter's output. Runs before the hook that reduces the layer's output, if
    any.
    """
    adapted: Tensor = layer.lora(args[0] if args else kwargs["input"], output)
    return adapted


def _adapter_initial(leaf: str, layer: Any) -> Initial:
    return Constant(0.0) if leaf == "B" else Normal(1 / math.sqrt(3 * layer.in_features))


def _initial_value(model: nn.Module, own: Callable[[str], Initial], name: str) -> Initial:
    """`initial_value` of an adapted model: answers for the adapters, else asks the model's own method."""
    layer, _, leaf = name.rpartition(".lora.")
    return _adapter_initial(leaf, model.get_submodule(layer)) if layer else own(name)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _merged_weight(layer: Any) -> Tensor:
    """This rank's part of a layer's weight with the adapter added."""
    weight, a, b = _local(layer.weight), _gather(layer.lora, "A"), _gather(layer.lora, "B")
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + _stored_part(layer, layer.lora.scale * (b.to(wide) @ a.to(wide)))).to(weight.dtype)


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


def _stored_part(layer: Any, product: Tensor) -> Tensor:
    """This rank's stored part of the weight's update. product: the update in the layout in which the
    weight computes.
    """
    if not isinstance(layer.weight, DTensor):
        return product
    update = wrap(product, layout_in_call(layer, "weight"), layer.weight.shape)
    return reshard(update, placements=layout_of(layer.weight)).to_local()
