"""The places of LoRA adapters in a model: found by names, and reached by the key of dropout.

`find_places` finds the weights to adapt: linear layers and projections of experts.

`hand_keys`: how the model's argument `dropout_key` reaches the adapters. A linear layer is called with an input alone.
The nearest module around the layer with a parameter `dropout_key`, a block for example, hands the key to the layer's
adapter for the duration of each call. Recomputation calls the module's forward with the arguments of the first call,
and draws the same masks, even after calls for further microbatches.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NoReturn

from torch import nn

from ..experts import Experts
from ..low_rank import PROJECTIONS, LowRank
from .batch import Ordered
from .packed.exchange import RowOrders
from .recompute import replace_forward
from .resolve import nearest


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """A weight to adapt, and the name of the adapter."""

    target: str  # the name of a linear layer, or of a projection of experts
    owner: Any  # the linear layer, or the module of experts
    leaf: str  # the weight's name in `owner`
    adapter: str  # the name of the adapter to attach


def find_places(model: nn.Module, targets: Sequence[str]) -> list[AdapterPlace]:
    """The weights named by `targets`, in the model's order. Raises ValueError as `lora` does."""
    if isinstance(targets, str) or not targets:
        raise ValueError(
            f'lora: targets is {targets!r}; give names of layers in a list, as ["layers.*.self_attn.q_proj"]'
        )
    modules: dict[str, Any] = {name: module for name, module in model.named_modules() if name}
    places: dict[str, AdapterPlace] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            places[name] = AdapterPlace(name, module, "weight", f"{name}.lora")
        elif isinstance(module, Experts):
            places |= {
                f"{name}.{leaf}": AdapterPlace(f"{name}.{leaf}", module, leaf, f"{name}.lora.{leaf}")
                for leaf in PROJECTIONS
            }
    candidates = list(dict.fromkeys((*modules, *places)))
    matching: set[str] = set()
    for pattern in targets:
        names = _matching_names(pattern, candidates)
        if not names:
            known = candidates if "." in pattern else list(dict.fromkeys(map(_last_part, places)))
            raise ValueError(
                f"LoRA target {pattern!r} matches no module of {type(model).__name__}; {nearest(pattern, known)}"
            )
        for name in names:
            if name not in places:
                _refuse(pattern, name, modules[name])
        matching.update(names)
    chosen = [place for name, place in places.items() if name in matching]
    _check_places(model, chosen)
    return chosen


def _matching_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names matched by a target. A target without a dot that matches no whole name is compared with last parts."""
    whole = [name for name in names if fnmatchcase(name, pattern)]
    return whole if whole or "." in pattern else [name for name in names if fnmatchcase(_last_part(name), pattern)]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _check_places(model: nn.Module, places: list[AdapterPlace]) -> None:
    """Raises ValueError for a tied weight, and for experts with a forward of their own."""
    name_counts = Counter(each for _, each in model.named_parameters(remove_duplicate=False))
    for place in places:
        weight = getattr(place.owner, place.leaf)
        if name_counts[weight] > 1:
            tied = [n for n, each in model.named_parameters(remove_duplicate=False) if each is weight]
            raise ValueError(
                f"LoRA target {place.target!r} has a tied weight, {' and '.join(tied)}: folded in, its adapter would "
                f"change both; leave {place.target!r} out"
            )
        if isinstance(place.owner, Experts) and type(place.owner).forward is not Experts.forward:
            raise ValueError(
                f"LoRA target {place.target!r} is of a {type(place.owner).__name__}, whose own forward would ignore "
                f"adapters; leave {place.target!r} out, or use weft.models.experts.Experts"
            )


def _refuse(pattern: str, name: str, module: nn.Module) -> NoReturn:
    if isinstance(module, Experts):
        raise ValueError(
            f"LoRA target {pattern!r} matches {name!r}, an {type(module).__name__}, whose adapters are for its "
            f"projections; name {' or '.join(repr(f'{name}.{leaf}') for leaf in PROJECTIONS)}, or all by "
            f"'{name}.*_proj'"
        )
    raise ValueError(
        f"LoRA target {pattern!r} matches {name!r}, a {type(module).__name__}; adapters are for Linear layers and the "
        f"projections of Experts"
    )


_ARGUMENT = "dropout_key"


def check_dropout(model: nn.Module, dropout: float, places: Sequence[AdapterPlace]) -> None:
    """Raises ValueError for a probability out of range, and for adapters without a module to hand them a key."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"lora: dropout is {dropout!r}; it must be a number from 0 to below 1")
    if not dropout:
        return
    for place in places:
        if not isinstance(place.owner, nn.Linear):
            raise ValueError(
                f"lora: dropout is {dropout}, and the adapter of {place.target!r}, a projection of experts, has no "
                f"dropout; use dropout=0, or leave {place.target!r} out of the targets"
            )
        if _module_with_key(model, place.target) is None:
            raise ValueError(
                f"lora: dropout is {dropout}, but no module around {place.target!r} takes the argument {_ARGUMENT}; "
                f"add {_ARGUMENT}=None to the forward of its block, or use dropout=0"
            )


def hand_keys(model: nn.Module, adapters: Sequence[str]) -> None:
    """Replace the forward of modules around adapters: each call hands the argument `dropout_key` to the adapters.

    adapters: names of `LowRank`s.
    """
    adapters_by_module: dict[str, list[LowRank]] = {}
    for name in adapters:
        module_name = _module_with_key(model, name.removesuffix(".lora"))
        adapter = model.get_submodule(name)
        assert module_name is not None and isinstance(adapter, LowRank), "check_dropout refuses other places"
        adapters_by_module.setdefault(module_name, []).append(adapter)
    for module_name, own in adapters_by_module.items():
        module = model.get_submodule(module_name)
        names = list(inspect.signature(type(module).forward).parameters)[1:]  # without self
        replace_forward(module, partial(_with_key, tuple(own), names.index(_ARGUMENT)))


def take_keys_back(model: nn.Module) -> None:
    """Restore the forwards replaced by `hand_keys`."""
    for module in model.modules():
        replace_forward(module, _without_key)


def _module_with_key(model: nn.Module, layer: str) -> str | None:
    """The name of the nearest module around a layer whose forward takes `dropout_key`; None without one."""
    name = layer
    while name:
        name = name.rpartition(".")[0]
        if _ARGUMENT in inspect.signature(type(model.get_submodule(name)).forward).parameters:
            return name
    return None


def _with_key(adapters: tuple[LowRank, ...], position: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that hands the key to `adapters`. position: of dropout_key among the arguments."""
    handing = partial(_forward, adapters, position, forward)
    handing.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # read by hooks of inputs
    return handing


def _without_key(forward: Callable[..., Any]) -> Callable[..., Any]:
    own: Callable[..., Any] = forward.args[2] if isinstance(forward, partial) and forward.func is _forward else forward
    return own


def _forward(
    adapters: tuple[LowRank, ...], position: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    key = args[position] if position < len(args) else kwargs.get(_ARGUMENT)
    mask: dict[str, Any] | None = None if key is None else {"key": key}
    if isinstance(key, Ordered):
        order = key.order
        mask = {"key": key.value, **({"orders": order.orders} if isinstance(order, RowOrders) else {"order": order})}
    for adapter in adapters:
        adapter.mask = mask
    try:
        return forward(*args, **kwargs)
    finally:
        for adapter in adapters:
            adapter.mask = None
