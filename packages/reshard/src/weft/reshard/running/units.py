"""Modules whose sharded parameters are gathered when they are called, dropped after, and gathered again in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout

from .dtensor import layout_of
from .gathering import Gather, Gathers
from .trees import tensors_of
from .wholes import Gathering, Whole, Wholes, in_backward

P = ParamSpec("P")
R = TypeVar("R")

_UNIT = "_gathered_unit"  # the attribute of a module in which its unit is
_LAYOUTS = "_gathered_layouts"  # and that in which are the layouts of its parameters when they are whole, by name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A sharded parameter: the module that has it and the name, and the layout in which it computes.

    stays, sums: see `Whole`.
    """

    module: nn.Module
    name: str
    layout: Layout
    stays: bool
    sums: bool

    @property
    def parameter(self) -> DTensor:
        """What the module has there now: the shard, or the whole where that computes."""
        parameter = self.module._parameters[self.name]
        assert isinstance(parameter, DTensor), "it was laid out, and to() and to_empty() leave it so"
        return parameter


_Found = tuple[Place, DTensor, Whole]
_Missing = tuple[DTensor, Whole, object]  # a shard, and its state when its gather was started
_Ahead = tuple[Gathers, list[_Missing], int]  # and the time of that


class Unit:
    """The sharded parameters of a module, gathered together.

    keeps: what forward gathers is kept for backward.
    """

    def __init__(self, wholes: Wholes, places: Sequence[Place], *, keeps: bool) -> None:
        self._wholes, self._places, self._keeps = wholes, list(places), keeps
        self._calls = 0  # that are running
        self._swapped: list[tuple[Place, DTensor]] = []  # the shards, where wholes compute
        self._held: list[Whole] = []
        self._known: list[tuple[DTensor, Whole] | None] = []  # of each place, what it had when it was last looked at
        self._gathers: dict[tuple[Whole, ...], Gathers] = {}  # by what they make whole
        self._ahead: _Ahead | None = None
        self._kept: set[_Call] = set()  # whose backward is waited for
        self._backward: set[_Call] = set()  # calls whose backward runs
        self._awaited: set[Whole] = set()  # those to whose gradients it still adds
        self.goes_backward = False
        wholes.units.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        memo[id(self)] = copied = Unit(copy.deepcopy(self._wholes, memo), (), keeps=self._keeps)
        for place in self._places:
            module = copy.deepcopy(place.module, memo)
            copied._places.append(
                Place(module=module, name=place.name, layout=place.layout, stays=place.stays, sums=place.sums)
            )
        return copied

    @property
    def gathered_by(self) -> Wholes:
        """What it shares with the other units of its model."""
        return self._wholes

    def wholes(self) -> dict[DTensor, Whole]:
        """By shard, between calls of the module."""
        return {shard: whole for _, shard, whole in self._found()}

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `forward` returns, which is called with the parameters whole. Communication: their gather, where they are not."""
        self._wholes.enter()
        self._calls += 1
        try:
            self._make_whole()
            self._start(self._wholes.after(self))
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled():
                self._watch((args, kwargs), output)
        finally:
            self._calls -= 1
            self._wholes.leave()
            self._settle()
        return output

    def begin_backward(self, call: _Call) -> None:
        """Backward comes to a call. Communication: the gather, where the parameters were dropped."""
        self.goes_backward = True
        self._kept.discard(call)
        if call.inputs:
            self._backward.add(call)
        self._make_whole()
        self._awaited.update(whole for whole in self._held if whole.leaf.requires_grad)
        self._wholes.settle_after_backward(self)
        self._start(self._wholes.before(self))

    def end_pass(self) -> None:
        """The backward pass is over: gradients that have not come are not waited for."""
        if not self._calls and (self._backward or self._awaited):
            self._give_up()
            self._settle()

    def end_backward(self, call: _Call) -> None:
        """The gradients of a call's inputs are there."""
        self._backward.discard(call)
        self._settle()

    def accumulated(self, whole: Whole) -> None:
        """Backward has added to the gradient of a whole for the last time."""
        if whole in self._awaited:
            self._awaited.discard(whole)
            self._settle()

    def start(self) -> None:
        """Starts to gather what is not whole, or not what the shards are now."""
        if self._ahead is None and not self._swapped:
            self._gather(self._found())

    def rest(self) -> None:
        """Nothing computes: what a backward pass left whole is given back, and what was gathered ahead in vain."""
        if self._calls:
            return
        if self._ahead is not None:
            self._ahead[0].give_up()
            self._ahead = None
        self._give_up()
        self._kept.clear()
        self._settle()

    def _give_up(self) -> None:
        for call in self._backward:
            call.left = 0
        self._backward.clear()
        self._awaited.clear()

    def drop(self) -> None:
        """Gives back what stays whole from step to step too; the next call gathers it."""
        self.rest()
        for whole in self.wholes().values():
            if not whole.users:
                whole.drop()

    def _found(self) -> list[_Found]:
        """The places, their shards and wholes; without those that another unit, within which this one is called, has made whole."""
        if len(self._known) < len(self._places):
            self._known = [None] * len(self._places)
        found = []
        for i, (place, known) in enumerate(zip(self._places, self._known, strict=True)):
            parameter = place.parameter
            if known is None or known[0] is not parameter:
                if self._wholes.is_whole(parameter):
                    continue
                whole = self._wholes.find(parameter, place.layout, self, stays=place.stays, sums=place.sums)
                self._known[i] = known = parameter, whole
                self._gathers.clear()
            shard, whole = known
            whole.follow(shard)
            found.append((place, shard, whole))
        return found

    def _start(self, unit: Gathering | None) -> None:
        if unit is not None:
            unit.start()

    def _gather(self, found: Sequence[_Found]) -> None:
        states = {whole: (shard, whole.state_of(shard)) for _, shard, whole in found}
        time = self._wholes.time
        again = not in_backward()  # backward computes with what forward gathered
        missing = [
            (shard, whole, state)
            for whole, (shard, state) in states.items()
            if whole.filled != state or (again and whole.time != time)
        ]
        if not missing:
            return
        key = tuple(whole for _, whole, _ in missing)
        if key not in self._gathers:
            for whole in key:
                whole.make_room()
            self._gathers[key] = Gathers([Gather(shard, whole.layout, whole.memory) for shard, whole, _ in missing])
            for whole in key:
                if whole.filled is None:
                    whole.drop()
        self._gathers[key].start()
        self._ahead = self._gathers[key], missing, time

    def _make_whole(self) -> None:
        if self._swapped:
            return
        found = self._found()
        self._finish()
        self._gather(found)  # what has changed since it was gathered ahead
        self._finish()
        for place, shard, whole in found:
            assert whole.filled is not None, "it was gathered"
            if whole not in self._held:
                self._held.append(whole)
                whole.users += 1
            self._swapped.append((place, shard))
            place.module._parameters[place.name] = whole.leaf

    def _finish(self) -> None:
        """Waits for what was gathered ahead, and takes it where the shards are still what they were."""
        if self._ahead is None:
            return
        gathers, missing, time = self._ahead
        self._ahead = None
        if time != self._wholes.time or any(whole.state_of(shard) != state for shard, whole, state in missing):
            gathers.give_up()
            return
        for _, whole, _ in missing:
            whole.make_room()
        gathers.finish()
        for shard, whole, state in missing:
            whole.take(shard, state, time, keeps=self._wholes.keeps > 0)

    def _settle(self) -> None:
        """Puts the shards back where nothing computes with the wholes, and drops these where backward does not wait for them."""
        if self._calls or self._backward or self._awaited:
            return
        for place, shard in self._swapped:
            place.module._parameters[place.name] = shard  # type: ignore[assignment]  # a DTensor that is a Parameter
        self._swapped.clear()
        if self._kept or self._wholes.keeps:
            return
        for whole in self._held:
            whole.users -= 1
            if not whole.users and not whole.stays:
                whole.drop()
        self._held.clear()

    def _watch(self, arguments: object, output: object) -> None:
        if self._backward or self._awaited:
            return  # backward repeats the forward, and knows of the call
        outputs = _differentiable(output)
        call = _Call(self, _differentiable(arguments))
        if self._keeps or not outputs:  # of outputs that cannot be watched backward would come unseen
            self._kept.add(call)
        for each in outputs:
            each.register_hook(call.begin)  # type: ignore[no-untyped-call]


def _differentiable(tree: object) -> list[Tensor]:
    return [each for each in tensors_of(tree) if each.requires_grad]


class _Call:
    """A call of a unit's module, until its backward."""

    def __init__(self, unit: Unit, inputs: Sequence[Tensor]) -> None:
        self._unit, self.inputs, self.left = unit, len(inputs), 0
        for each in inputs:
            each.register_hook(self._input)  # type: ignore[no-untyped-call]

    def begin(self, _: Tensor) -> None:
        """Called when backward has the gradient of an output."""
        if not self.left:
            self.left = self.inputs
            self._unit.begin_backward(self)

    def _input(self, _: Tensor) -> None:
        """Called when it has the gradient of an input, from all that it was given to."""
        if self.left:
            self.left -= 1
            if not self.left:
                self._unit.end_backward(self)


class _Gathered:
    """What a module becomes besides: its call is its unit's, so also where its forward and its hooks are compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[_UNIT]
        return unit.call(super().__call__, args, kwargs)  # type: ignore[misc]


def _gathered(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` whose calls gather, under its name."""
    return type(kind.__name__, (_Gathered, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def gather_when_called(
    model: nn.Module, units: Mapping[nn.Module, Sequence[Place]], *, keeps: Callable[[nn.Module], bool]
) -> None:
    """Has the modules within `model` gather their parameters when they are called.

    units: by the module that is called, the parameters that it computes with, its own or those of modules within it.
    keeps: whether a unit's parameters stay gathered from forward to backward.
    """
    wholes = Wholes()
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for module, places in units.items():
        setattr(module, _UNIT, Unit(wholes, places, keeps=keeps(module)))
        for place in places:
            place.module.__dict__.setdefault(_LAYOUTS, {})[place.name] = place.layout
        kind = type(module)
        module.__class__ = kinds.setdefault(kind, kinds.get(kind) or _gathered(kind))
    model.register_forward_pre_hook(wholes.begin)
    model.register_forward_hook(wholes.end, always_call=True)


def units_of(module: nn.Module) -> list[Unit]:
    """The units of a module and of those within it."""
    return [each.__dict__[_UNIT] for each in module.modules() if _UNIT in each.__dict__]


@contextmanager
def fixed_parameters(model: nn.Module) -> Iterator[None]:
    """A promise that the parameters of `model` do not change inside: with zero=1 and 2 several forward passes gather them once.

    Elsewhere every forward pass gathers sharded parameters, since a program may have changed any. With zero=3 nothing is kept, so each
    pass gathers inside too. All ranks enter and leave together. Communication: none.

        with torch.no_grad(), fixed_parameters(model): losses = [evaluate(batch) for batch in held_out]
    """
    gathered = {unit.gathered_by for unit in units_of(model)}
    while_inside = _Inside()
    for each in gathered:
        each.fix(while_inside)
    try:
        yield
    finally:
        for each in gathered:
            each.fixed_by.discard(while_inside)


class _Inside:
    """A holder of the promise that parameters do not change."""


def with_fixed_parameters(function: Callable[Concatenate[nn.Module, P], R]) -> Callable[Concatenate[nn.Module, P], R]:
    """Calls `function` within `fixed_parameters` of its first argument."""

    @wraps(function)
    def call(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with fixed_parameters(model):
            return function(model, *args, **kwargs)

    return call


@contextmanager
def keeping_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, what the units of `model` gather stays until the end, for several passes that are under way at once.

    Values are not to change meanwhile. Communication: none of its own.
    """
    units = units_of(model)
    wholes = {unit.gathered_by for unit in units}
    for each in wholes:
        each.keeps += 1
    try:
        with fixed_parameters(model):
            yield
    finally:
        for each in wholes:
            each.keeps -= 1
        for unit in units:
            unit.rest()


def layout_in_call(module: nn.Module, name: str) -> Layout:
    """The layout in which a parameter of a module computes, between its calls: not that of its shard."""
    layouts: dict[str, Layout] = module.__dict__.get(_LAYOUTS, {})
    return layouts[name] if name in layouts else layout_of(getattr(module, name))


def drop_gathered(module: nn.Module) -> None:
    """Gives back the memory of whole parameters, between calls of the module: only the shards are left, until it is called again.

    With zero=1 and 2 their memory is kept from step to step, and after generating text, say, it may not be needed.
    """
    for unit in units_of(module):
        unit.drop()
