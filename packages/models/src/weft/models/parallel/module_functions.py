"""torch's functions of a whole module, called on a parallel model: loading a state_dict, and converting parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import distribute, layout_of
from weft.reshard.extension import with_mixin


def hook_module_functions(model: nn.Module) -> None:
    """Make the functions of a laid-out model take what those of the single-device model take.

    `load_state_dict` takes plain tensors, whole on every rank, as parameters. `to()`, `bfloat16()` and further
    conversions are refused once the parameters have been used in a step.
    """
    model.register_load_state_dict_pre_hook(_distribute_plain)  # type: ignore[no-untyped-call]
    model.__class__ = with_mixin(_Converting, type(model))


def hook_stage_loading(model: nn.Module, names: Collection[str]) -> None:
    """Make `load_state_dict` of a model cut into stages take the state of the whole model.

    names: the entries of the whole model's state, before the cut.
    """
    foreign = frozenset(names) - frozenset(model.state_dict())
    model.register_load_state_dict_pre_hook(partial(_drop_foreign, foreign))  # type: ignore[no-untyped-call]


def _distribute_plain(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before loading: plain tensors in place of DTensor parameters become DTensors. Communication: none.

    A tensor of another shape is left for torch, which names both shapes.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            device = value.device if parameter.is_meta else parameter.device
            state[prefix + name] = distribute(value.detach().to(device), layout_of(parameter))


def _drop_foreign(foreign: frozenset[str], model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before loading: removes the entries which ranks of further stages load."""
    for name in foreign:
        state.pop(prefix + name, None)


class _Converting:
    """Mixin put before a parallel model's class: refuses conversions that torch cannot do, with a remedy.

    torch swaps DTensor parameters for converted ones, which fails while a GradientSync or a gathered copy refers to a
    parameter.
    """

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        used = next((name for name, each in self.named_parameters() if weakref.getweakrefcount(each)), None)
        if used is None:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        with torch.no_grad():
            if all(fn(each) is each for each in (*self.parameters(), *self.buffers())):
                return self
        raise RuntimeError(
            f"this {type(self).__name__} has been trained as a parallel model, and a GradientSync or a gathered copy "
            f"holds {used} and further parameters: to(), half(), bfloat16() and to_empty() cannot replace them. "
            f"Convert the model before its first step, or compute in another dtype under torch.autocast; or save the "
            f"model by save_pretrained(model, folder), and read it by from_pretrained(folder, mesh, plan, dtype=...)"
        )
