"""A model that holds some of its stages: its own forward is run, and what is of other stages is passed by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map
from weft.reshard.running.trees import tensors_of

from .cut import Cut

KINDS = 64  # of arguments for which a module's shapes are kept: more than a step has


class _Left(Exception):  # it is no error: a forward ends so after the last layer of a stage
    """The forward of a stage is over. value: what its last layer gave."""

    def __init__(self, value: Any) -> None:
        super().__init__("a stage's forward is over")
        self.value = value


class Stages:
    """What a rank holds of a model that was cut, and which of its stages runs now.

    A layer before the stage that runs gives what was received, one that comes after is never called, since the forward is left
    after the stage's last. A module beside the layers that the stage does not use gives a shape without data, and runs nothing.
    """

    def __init__(self, model: nn.Module, cut: Cut, own: Sequence[int]) -> None:
        self.cut, self.own = cut, tuple(own)
        self._running: int | None = None
        self._received: Any = None
        self._around: list[tuple[nn.Module, str, Tensor]] = []  # of the forward's own, which other stages have
        self._device: torch.device | None = None  # where their shapes are
        partly = [unit for unit, stages in cut.units.items() if len(stages) < len(cut.ranges)]
        self._absent = {unit: _Absent(model.get_submodule(unit)) for unit in partly}
        self._remove_others(model)

    def take_calls(self, model: nn.Module) -> None:
        """Has the stage that runs decide what a layer or a unit does; last, so that what else answers a call is within."""
        for i, name in enumerate(self.cut.layers):
            _take_calls(model.get_submodule(name), lambda layer, args, kwargs, i=i: self._layer(i, layer, args, kwargs))
        for unit, stages in self.cut.units.items():
            shapes = self._absent.get(unit)
            _take_calls(
                model.get_submodule(unit),
                lambda unit, args, kwargs, stages=stages, shapes=shapes: self._unit(stages, shapes, unit, args, kwargs),
            )

    def forward(
        self, model: nn.Module, stage: int, received: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The forward of one stage: what its last layer gives, or, of the last stage, what the model does.

        received: what the last layer of the stage before gave; None for the first. args, kwargs: of the whole model.
        """
        assert self._running is None, "one stage runs at a time"
        self._running, self._received = stage, received
        self._place_shapes((args, kwargs))
        try:
            return model(*args, **kwargs)
        except _Left as left:
            return left.value
        finally:
            self._running = self._received = None

    def _place_shapes(self, given: Any) -> None:
        """Puts shapes in the places of parameters that other stages have, on the device of what the model is given."""
        if not self._around:
            return
        device = _device_of(given)
        if device != self._device:
            self._device = device
            for module, leaf, shape in self._around:
                object.__setattr__(module, leaf, _fake(shape, device))

    def _layer(self, index: int, layer: Any, args: Any, kwargs: Any) -> Any:
        start, stop = self._range()
        if index < start:
            return self._received
        if index == start and any(isinstance(x, FakeTensor) for x in tensors_of((args, kwargs))):
            raise RuntimeError(
                f"{self.cut.layers[index]} reads a value of which stage {self._running} has the shape alone: it was made by a "
                f"module that earlier stages have, in a way that could not be followed on shapes"
            )
        output = layer(*args, **kwargs)
        if index == stop - 1 and stop < len(self.cut.layers):
            raise _Left(output)
        return output

    def _unit(self, stages: frozenset[int], shapes: Any, unit: Any, args: Any, kwargs: Any) -> Any:
        self._range()
        return unit(*args, **kwargs) if self._running in stages else shapes(*args, **kwargs)

    def _range(self) -> tuple[int, int]:
        if self._running is None:
            raise RuntimeError(
                f"the model is cut into {len(self.cut.ranges)} stages, of which this rank holds {', '.join(map(str, self.own))}: "
                f"it cannot be called alone; use forward_backward(model, criterion, tokens, targets)"
            )
        return self.cut.ranges[self._running]

    def _remove_others(self, model: nn.Module) -> None:
        """Takes the parameters of other stages off the model, and the buffers of modules that are theirs."""
        own = set(self.own)
        first = {parameter: name for name, parameter in model.named_parameters()}
        inside = {name: {stage} for stage, (a, b) in enumerate(self.cut.ranges) for name in self.cut.layers[a:b]}
        inside |= {name: set(stages) for name, stages in self.cut.units.items()}
        for name, module in model.named_modules():
            within = next((each for each in inside if f"{name}.".startswith(f"{each}.")), None)
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if self.cut.parameters[first[parameter]] & own:
                    continue
                if within is None:  # read by the forward of a module around the layers
                    del module._parameters[leaf]
                    self._around.append((module, leaf, parameter.detach().to("meta")))
                else:
                    module.register_parameter(leaf, None)
            if within is not None and not inside[within] & own:
                for leaf in list(module._buffers):
                    module._buffers[leaf] = None


def _take_calls(module: nn.Module, called: Any) -> None:
    """Has `called(run, args, kwargs)` answer the calls of a module; its hooks, and what it was compiled to, are in `run`."""
    kind: Any = type(module)
    module.__class__ = _taken(kind)
    object.__setattr__(module, "_called", called)


@lru_cache(maxsize=1024)
def _taken(kind: Any) -> Any:
    """The same class, whose calls are answered elsewhere. As torch's fully_shard does, so that names and kinds stay."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._called(super(made, self).__call__, args, kwargs)

    made: Any = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__})
    return made


@cache
def _shapes() -> FakeTensorMode:
    """Made when it is first used, as it loads Dynamo and Triton."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _device_of(given: Any) -> torch.device:
    return next((x.device for x in tensors_of(given)), torch.device("cpu"))


def _fake(x: Tensor, device: torch.device) -> Tensor:
    """The shape of a tensor on a device, without data; of all of it where it is sharded."""
    with torch.inference_mode(False), _shapes():  # it may be kept, for training too
        return torch.empty(x.shape, dtype=x.dtype, device=device)


class _Absent:
    """What calls a module of other stages on shapes alone: a copy of it without data, on the device of what it is given.

    It is called once for shapes that it is given again: on shapes an op takes the host ten times as long as on small tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = _replaced(module, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")).eval()
        self._on: dict[torch.device, nn.Module] = {}
        self._given: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = _kind((args, kwargs))
        if kind is None:
            return self._call(args, kwargs)
        if kind not in self._given:
            if len(self._given) == KINDS:  # as of numbers that differ from step to step
                self._given.clear()
            self._given[kind] = self._call(args, kwargs)
        return self._given[kind]

    def _call(self, args: Any, kwargs: Any) -> Any:
        device = _device_of((args, kwargs))
        if device not in self._on:
            self._on[device] = _replaced(self._module, lambda x: _fake(x, device))
        with torch.inference_mode(False), torch.no_grad():
            given = tree_map(lambda x: _fake(x, device) if isinstance(x, DTensor) else x, (args, kwargs))
            return self._on[device](*given[0], **given[1])


def _kind(given: Any) -> Any:
    """Equal for arguments from which a module makes the same shapes; None where they are not tensors and plain values alone."""
    args, kwargs = given
    if not kwargs and all(isinstance(x, Tensor) for x in args):
        return tuple([(x.shape, x.dtype, x.device) for x in args])
    leaves, structure = tree_flatten(given)
    if not all(isinstance(x, Tensor | bool | int | float | str | None) for x in leaves):
        return None
    kinds = ((tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves)
    return str(structure), *kinds


def _replaced(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the module with what `make` gives in the places of its tensors."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        made = make(tensor)
        memo[id(tensor)] = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(module, memo)
