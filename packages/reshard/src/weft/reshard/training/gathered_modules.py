"""Units: modules with sharded parameters, gathered for forward, freed, and gathered again for backward.

For ZeRO, weft.models' parallel/zero.py makes a unit (`gather_when_called`) of each transformer block, and of each
module outside the blocks that has sharded parameters. A unit's call swaps the shards for full copies
(full_parameters.py), runs the module, and swaps back. Hooks on the call's inputs and outputs tell when backward enters
and leaves the module. While a unit computes, the next unit's gather runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from ..moving.dtensor import layout_of
from .full_parameters import FullParameter, Gathering, ModelGathering, in_backward
from .gathering import Gather, Gathers
from .trees import differentiable

P = ParamSpec("P")
R = TypeVar("R")

_UNIT = "_gathered_unit"  # attribute of a module: the module's unit
_LAYOUTS = "_gathered_layouts"  # attribute of a module: by name, the layouts of its parameters' full copies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A sharded parameter of a unit: the module and name, and the layout in which the module computes."""

    module: nn.Module
    name: str
    layout: Layout  # of the full copy
    keep_between_calls: bool  # see `FullParameter`
    accumulate_grad: bool  # see `FullParameter`

    @property
    def parameter(self) -> DTensor:
        """The parameter now registered at this place: the shard, or the full copy while the unit computes."""
        parameter = self.module._parameters[self.name]
        assert isinstance(parameter, DTensor), "a sharded parameter is a DTensor, also after to() and to_empty()"
        return parameter


_Entry = tuple[Place, DTensor, FullParameter]
_Stale = tuple[DTensor, FullParameter, object]  # shard, full copy, and the shard's state when its gather was started
_Prefetch = tuple[Gathers, list[_Stale], int]  # a gather under way, its shards, and the `pass_number` at its start


class Unit:
    """The sharded parameters of a module, gathered together.

    keep_for_backward: keep the full copies of forward until backward.
    """

    def __init__(self, model_gathering: ModelGathering, places: Sequence[Place], *, keep_for_backward: bool) -> None:
        self._model, self._places, self._keep_for_backward = model_gathering, list(places), keep_for_backward
        self._calls = 0  # number of running calls
        self._swapped: list[tuple[Place, DTensor]] = []  # the shards, while full copies are in their places
        self._in_use: list[FullParameter] = []  # full copies in use by this unit; not freed
        self._resolved: list[tuple[DTensor, FullParameter] | None] = []  # for each place, the last shard and full copy
        self._gathers: dict[tuple[FullParameter, ...], Gathers] = {}  # by the full copies to fill
        self._prefetch: _Prefetch | None = None
        self._before_backward: set[_Call] = set()  # calls whose full copies are kept for backward
        self._in_backward: set[_Call] = set()  # calls whose backward runs
        self._awaiting_grad: set[FullParameter] = set()  # to whose gradients this backward pass still adds
        self.goes_backward = False  # whether backward has ever come to this unit
        model_gathering.units.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        memo[id(self)] = copied = Unit(copy.deepcopy(self._model, memo), (), keep_for_backward=self._keep_for_backward)
        for place in self._places:
            copied._places.append(replace(place, module=copy.deepcopy(place.module, memo)))
        return copied

    @property
    def model_gathering(self) -> ModelGathering:
        """The state shared by the units of the model."""
        return self._model

    def full_parameters(self) -> dict[DTensor, FullParameter]:
        """The full copy of each shard, between calls of the module."""
        return {shard: full for _, shard, full in self._entries()}

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `forward` with full copies as parameters, and returns the output. Communication: a gather if needed."""
        self._model.enter_unit()
        self._calls += 1
        try:
            self._swap_in()
            self._prefetch_unit(self._model.next_in_forward(self))
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled():
                self._hook_call((args, kwargs), output)
        finally:
            self._calls -= 1
            self._model.leave_unit()
            self._release()
        return output

    def begin_backward(self, call: _Call) -> None:
        """Called when backward comes to a call. Communication: a gather, where the full copies were freed."""
        self.goes_backward = True
        self._before_backward.discard(call)
        if call.inputs:
            self._in_backward.add(call)
        self._swap_in()
        self._awaiting_grad.update(full for full in self._in_use if full.leaf.requires_grad)
        self._model.end_pass_after_backward(self)
        self._prefetch_unit(self._model.next_in_backward(self))

    def end_pass(self) -> None:
        """Called when a backward pass is over: no more gradients will come."""
        if not self._calls and (self._in_backward or self._awaiting_grad):
            self._forget_backward()
            self._release()

    def end_backward(self, call: _Call) -> None:
        """Called when backward has the gradients of a call's inputs."""
        self._in_backward.discard(call)
        self._release()

    def on_grad_accumulated(self, full: FullParameter) -> None:
        """Called when backward has added the last gradient to a full copy."""
        if full in self._awaiting_grad:
            self._awaiting_grad.discard(full)
            self._release()

    def start(self) -> None:
        """Starts to gather parameters ahead of the module's call, where full copies are missing or out of date."""
        if self._prefetch is None and not self._swapped:
            self._start_gather(self._entries())

    def release_idle(self) -> None:
        """Drops a gather ahead and frees full copies, unless a call runs. Copies with `keep_between_calls` stay."""
        if self._calls:
            return
        if self._prefetch is not None:
            self._prefetch[0].discard()
            self._prefetch = None
        self._forget_backward()
        self._before_backward.clear()
        self._release()

    def _forget_backward(self) -> None:
        for call in self._in_backward:
            call.inputs_left = 0
        self._in_backward.clear()
        self._awaiting_grad.clear()

    def drop(self) -> None:
        """Frees all full copies, also if kept from step to step; the next call gathers again."""
        self.release_idle()
        for full in self.full_parameters().values():
            if not full.users:
                full.free()

    def _entries(self) -> list[_Entry]:
        """The places with their shards and full copies, without parameters that an enclosing unit has swapped."""
        if len(self._resolved) < len(self._places):
            self._resolved = [None] * len(self._places)
        found = []
        for i, (place, known) in enumerate(zip(self._places, self._resolved, strict=True)):
            parameter = place.parameter
            if known is None or known[0] is not parameter:
                if self._model.is_full(parameter):
                    continue
                full = self._model.find_or_make(
                    parameter,
                    place.layout,
                    self,
                    keep_between_calls=place.keep_between_calls,
                    accumulate_grad=place.accumulate_grad,
                )
                self._resolved[i] = known = parameter, full
                self._gathers.clear()
            shard, full = known
            full.follow(shard)
            found.append((place, shard, full))
        return found

    def _prefetch_unit(self, unit: Gathering | None) -> None:
        if unit is not None:
            unit.start()

    def _start_gather(self, found: Sequence[_Entry]) -> None:
        states = {full: (shard, full.state_of(shard)) for _, shard, full in found}
        pass_number = self._model.pass_number
        in_forward = not in_backward()  # backward computes with forward's values
        stale = [
            (shard, full, state)
            for full, (shard, state) in states.items()
            if full.filled != state or (in_forward and full.filled_in_pass != pass_number)
        ]
        if not stale:
            return
        key = tuple(full for _, full, _ in stale)
        if key not in self._gathers:
            for full in key:
                full.allocate()
            self._gathers[key] = Gathers([Gather(shard, full.layout, full.buffer) for shard, full, _ in stale])
            for full in key:
                if full.filled is None:
                    full.free()
        self._gathers[key].start()
        self._prefetch = self._gathers[key], stale, pass_number

    def _swap_in(self) -> None:
        if self._swapped:
            return
        found = self._entries()
        self._finish_prefetch()
        self._start_gather(found)  # shards changed since the gather ahead
        self._finish_prefetch()
        for place, shard, full in found:
            assert full.filled is not None, "the gather above has filled it"
            if full not in self._in_use:
                self._in_use.append(full)
                full.users += 1
            self._swapped.append((place, shard))
            place.module._parameters[place.name] = full.leaf

    def _finish_prefetch(self) -> None:
        """Fills the full copies by the gather under way; drops it if a shard changed or `pass_number` rose since."""
        if self._prefetch is None:
            return
        gathers, stale, pass_number = self._prefetch
        self._prefetch = None
        if pass_number != self._model.pass_number or any(full.state_of(shard) != state for shard, full, state in stale):
            gathers.discard()
            return
        for _, full, _ in stale:
            full.allocate()
        gathers.finish()
        for shard, full, state in stale:
            full.mark_filled(shard, state, pass_number, keep_after_call=self._model.keepers > 0)

    def _release(self) -> None:
        """Swaps the shards back in and frees unused full copies, unless forward or backward of the module runs."""
        if self._calls or self._in_backward or self._awaiting_grad:
            return
        for place, shard in self._swapped:
            place.module._parameters[place.name] = shard  # type: ignore[assignment]  # a DTensor that is a Parameter
        self._swapped.clear()
        if self._before_backward or self._model.keepers:
            return
        for full in self._in_use:
            full.users -= 1
            if not full.users and not full.keep_between_calls:
                full.free()
        self._in_use.clear()

    def _hook_call(self, arguments: object, output: object) -> None:
        if self._in_backward or self._awaiting_grad:
            return  # a recomputation in backward: the call is known
        outputs = differentiable(output)
        call = _Call(self, differentiable(arguments))
        if self._keep_for_backward or not outputs:  # without an output to hook, nothing tells when backward comes
            self._before_backward.add(call)
        for each in outputs:
            each.register_hook(call.begin)  # type: ignore[no-untyped-call]


class _Call:
    """A call of a unit's module, from forward to the end of backward; hooks tell the unit."""

    def __init__(self, unit: Unit, inputs: Sequence[Tensor]) -> None:
        self._unit, self.inputs, self.inputs_left = unit, len(inputs), 0
        for each in inputs:
            each.register_hook(self._input)  # type: ignore[no-untyped-call]

    def begin(self, _: Tensor) -> None:
        """Hook: backward has the gradient of an output of the call."""
        if not self.inputs_left:
            self.inputs_left = self.inputs
            self._unit.begin_backward(self)

    def _input(self, _: Tensor) -> None:
        """Hook: backward has the complete gradient of an input of the call."""
        if self.inputs_left:
            self.inputs_left -= 1
            if not self.inputs_left:
                self._unit.end_backward(self)


class _UnitCall:
    """Mixin put before a module's class: calling the module runs `Unit.call`, also in compiled code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[_UNIT]
        return unit.call(super().__call__, args, kwargs)  # type: ignore[misc]


def _gathering_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind`, of the same name, whose calls gather."""
    return type(kind.__name__, (_UnitCall, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def gather_when_called(
    model: nn.Module, units: Mapping[nn.Module, Sequence[Place]], *, keep_for_backward: Callable[[nn.Module], bool]
) -> None:
    """Makes units of modules within `model`, which then gather parameters when called.

    units: by module, the parameters used in the module's call, of the module itself or of modules within.
    keep_for_backward: whether a unit's full copies are kept from forward to backward.
    """
    model_gathering = ModelGathering()
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for module, places in units.items():
        setattr(module, _UNIT, Unit(model_gathering, places, keep_for_backward=keep_for_backward(module)))
        for place in places:
            place.module.__dict__.setdefault(_LAYOUTS, {})[place.name] = place.layout
        kind = type(module)
        module.__class__ = kinds.setdefault(kind, kinds.get(kind) or _gathering_class(kind))
    model.register_forward_pre_hook(model_gathering.before_forward)
    model.register_forward_hook(model_gathering.after_forward, always_call=True)


def gathering_units(module: nn.Module) -> list[Unit]:
    """The units of a module and of all modules within."""
    return [each.__dict__[_UNIT] for each in module.modules() if _UNIT in each.__dict__]


@contextmanager
def fixed_parameters(model: nn.Module) -> Iterator[None]:
    """A promise: inside, the parameters of `model` do not change. Forward passes with zero=1 and 2 then share a gather.

    Without the promise each forward pass gathers sharded parameters, since a program may have changed any. With zero=3
    no full copies are kept, and each pass gathers inside as well. All ranks enter and leave together. Communication:
    none.

        with torch.no_grad(), fixed_parameters(model): losses = [evaluate(batch) for batch in held_out]
    """
    gathered = {unit.model_gathering for unit in gathering_units(model)}
    holder = _Inside()
    for each in gathered:
        each.fix(holder)
    try:
        yield
    finally:
        for each in gathered:
            each.fixed_by.discard(holder)


class _Inside:
    """Holds the promise of a `fixed_parameters` block."""


def with_fixed_parameters(function: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Decorator: runs `function` within `fixed_parameters` of the first argument."""

    @wraps(function)
    def call(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with fixed_parameters(model):
            return function(model, *args, **kwargs)

    return call


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, full copies gathered by the units of `model` are kept to the end, for a pipeline's interleaved passes.

    Parameters must not change meanwhile. Communication: none.
    """
    units = gathering_units(model)
    gathered = {unit.model_gathering for unit in units}
    for each in gathered:
        each.keepers += 1
    try:
        with fixed_parameters(model):
            yield
    finally:
        for each in gathered:
            each.keepers -= 1
        for unit in units:
            unit.release_idle()


def layout_in_call(module: nn.Module, name: str) -> Layout:
    """The layout in which a module computes with a parameter; between calls the parameter itself is a shard."""
    layouts: dict[str, Layout] = module.__dict__.get(_LAYOUTS, {})
    return layouts[name] if name in layouts else layout_of(getattr(module, name))


def drop_gathered(module: nn.Module) -> None:
    """Frees the full copies of parameters, between calls of the module: only the shards are left until the next call.

    With zero=1 and 2 full copies otherwise stay in memory between steps.
    """
    for unit in gathering_units(module):
        unit.drop()
