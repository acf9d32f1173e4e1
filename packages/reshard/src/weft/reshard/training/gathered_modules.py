"""Makes modules gather sharded parameters when called; contexts in which the gathered copies stay.

For ZeRO, weft.models' parallel/parameter_layouts.py makes a `Unit` (unit.py) of each transformer block, and of each
module outside the blocks that has sharded parameters, by `gather_when_called`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from weft.mesh import Layout

from ..moving.dtensor import layout_of
from .full_parameters import ModelGathering
from .hooks import with_mixin
from .unit import ParameterSlot, Unit

P = ParamSpec("P")
R = TypeVar("R")

_UNIT = "_gathered_unit"  # attribute of a module: the module's unit
_LAYOUTS = "_gathered_layouts"  # attribute of a module: {parameter name: layout of the full copy}


class _UnitCall:
    """Mixin put before a module's class: calling the module runs `Unit.call`, also in compiled code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[_UNIT]
        return unit.call(super().__call__, args, kwargs)  # type: ignore[misc]


def gather_when_called(
    model: nn.Module,
    units: Mapping[nn.Module, Sequence[ParameterSlot]],
    *,
    keep_for_backward: Callable[[nn.Module], bool],
) -> None:
    """Makes units of modules within `model`, which then gather parameters when called.

    units: for each module, the slots of the parameters used in its call, of the module itself or of modules within.
    keep_for_backward: whether a unit's full copies are kept from forward to backward.
    """
    model_gathering = ModelGathering()
    for module, slots in units.items():
        setattr(module, _UNIT, Unit(model_gathering, slots, keep_for_backward=keep_for_backward(module)))
        for slot in slots:
            slot.module.__dict__.setdefault(_LAYOUTS, {})[slot.name] = slot.layout
        module.__class__ = with_mixin(_UnitCall, type(module))
        module.register_state_dict_pre_hook(_separate_shards)  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(model_gathering.before_forward)
    model.register_forward_hook(model_gathering.after_forward, always_call=True)


def _separate_shards(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook before a module's `state_dict()`: entries own their memory, to be copied and saved alone."""
    unit: Unit = module.__dict__[_UNIT]
    unit.separate_shards()


def gathering_units(module: nn.Module) -> list[Unit]:
    """The units of a module and of all modules within.

    Called by GradientSync, by the functions of this file, and by weft.models to measure memory.
    """
    modules = [module]
    for each in modules:  # the list grows meanwhile; `module.modules()` would make every name
        modules += [child for child in each._modules.values() if child is not None]
    return list(dict.fromkeys(each.__dict__[_UNIT] for each in modules if _UNIT in each.__dict__))


@contextmanager
def fixed_parameters(model: nn.Module) -> Iterator[None]:
    """Context manager: promises that the parameters of `model` do not change in the block.

    With zero=1 and 2 the block's forward passes then share a gather. Without the promise each forward pass gathers the
    sharded parameters, because the program may have changed a parameter. With zero=3 no full copies are kept, so each
    pass gathers inside the block as well. Used by weft.models' generation and Trainer. All ranks enter and leave
    together. Communication: none.

        with torch.no_grad(), fixed_parameters(model): losses = [evaluate(batch) for batch in held_out]
    """
    model_gatherings = {unit.model_gathering for unit in gathering_units(model)}
    holder = _FixedBlock()
    for each in model_gatherings:
        each.promise_fixed(holder)
    try:
        yield
    finally:
        for each in model_gatherings:
            each.promise_holders.discard(holder)


class _FixedBlock:
    """Stands for a `fixed_parameters` block in `ModelGathering.promise_holders`; nested blocks differ by identity."""


def with_fixed_parameters(function: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorator: runs `function` within `fixed_parameters` of the first argument.

    Used by weft.models' step/find_gradients.py and step/preference.py.
    """

    @wraps(function)
    def call(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with fixed_parameters(model):
            return function(model, *args, **kwargs)

    return call


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Keeps full copies gathered by the units of `model` to the end of the block.

    Used by weft.models' pipeline (parallel/pipeline/run.py) around all microbatches of a step or an evaluation.
    Parameters must not change in the block. Communication: none.
    """
    units = gathering_units(model)
    model_gatherings = {unit.model_gathering for unit in units}
    for each in model_gatherings:
        each.keep_gathered_blocks += 1
    try:
        with fixed_parameters(model):
            yield
    finally:
        for each in model_gatherings:
            each.keep_gathered_blocks -= 1
        for unit in units:
            unit.release_idle()


def layout_in_call(module: nn.Module, name: str) -> Layout:
    """The layout in which a module computes with a parameter; between calls the parameter itself is a shard.

    `weft.models.lora` lays its factors out by this layout.
    """
    layouts: dict[str, Layout] = module.__dict__.get(_LAYOUTS, {})
    return layouts[name] if name in layouts else layout_of(getattr(module, name))


def drop_gathered(module: nn.Module) -> None:
    """Frees the full copies of parameters, between calls of the module: only the shards are left until the next call.

    With zero=1 and 2 full copies otherwise stay in memory between steps. Used by weft.models' Trainer before the first
    step, and by train/reference.py after scoring.
    """
    for unit in gathering_units(module):
        unit.drop()
