"""Dropout of the inputs of LoRA adapters: how the model's argument `dropout_key` reaches the adapters.

A linear layer is called with an input alone. The nearest module around the layer with a parameter `dropout_key`, a
block for example, hands the key to the layer's adapter for the duration of each call. Recomputation calls the module's
forward with the arguments of the first call, and draws the same masks, even after calls for further microbatches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..low_rank import LowRank
from .batch import Ordered
from .lora_targets import AdapterPlace
from .packed.rows import RowOrders
from .recompute import replace_forward

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
