"""Runs the model's own forward for a single stage of a cut model."""

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
from weft.reshard.extension import tensors_of

from .cut import Cut

KINDS = 64  # the most kinds of arguments for which `_Absent` caches outputs: more than occur in a step


class _StageEnd(Exception):
    """Raised to leave the model's forward after the last layer of a stage; not an error. value: the layer's output."""

    def __init__(self, value: Any) -> None:
        super().__init__("a stage's forward is over")
        self.value = value


class Stages:
    """The stages of a cut model that a rank holds. Made by `parallelize`. cut: of the model. own: the rank's stages.

    `forward` runs the model's own forward for a stage. A layer before the stage returns the received activations. The
    forward ends after the stage's last layer, so later layers are never called. A module outside the list of layers, if
    unused by the stage, computes only the shapes of outputs, without data.
    """

    def __init__(self, model: nn.Module, cut: Cut, own: Sequence[int]) -> None:
        self.cut, self.own = cut, tuple(own)
        self._running: int | None = None
        self._received: Any = None
        # Parameters of modules around the layers that other stages hold: module, name, and shape as a meta tensor.
        self._foreign_parameters: list[tuple[nn.Module, str, Tensor]] = []
        self._device: torch.device | None = None  # of the tensors that now replace the foreign parameters
        absent = [name for name, stages in cut.outer_modules.items() if len(stages) < len(cut.ranges)]
        self._absent = {name: _Absent(model.get_submodule(name)) for name in absent}
        self._remove_foreign(model)

    def route_calls(self, model: nn.Module) -> None:
        """Route the calls of the listed layers and `Cut.outer_modules` through this object: the running stage decides.

        Called last, so that hooks, gathers and compiled code registered before run inside of the routed calls.
        """
        for i, name in enumerate(self.cut.layers):
            _route_calls(
                model.get_submodule(name), lambda layer, args, kwargs, i=i: self._layer(i, layer, args, kwargs)
            )
        for name, stages in self.cut.outer_modules.items():
            shapes = self._absent.get(name)
            _route_calls(
                model.get_submodule(name),
                lambda outer, args, kwargs, stages=stages, shapes=shapes: self._outer(
                    stages, shapes, outer, args, kwargs
                ),
            )

    def forward(
        self, model: nn.Module, stage: int, received: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward of a stage. Returns the last layer's output; for the last stage, the model's output.

        received: the output of the previous stage's last layer; None for the first stage.
        args, kwargs: the arguments of the whole model.
        """
        assert self._running is None, "one stage runs at a time"
        self._running, self._received = stage, received
        self._place_shapes((args, kwargs))
        try:
            return model(*args, **kwargs)
        except _StageEnd as end:
            return end.value
        finally:
            self._running = self._received = None

    @property
    def running(self) -> int | None:
        """The stage that runs now."""
        return self._running

    def _place_shapes(self, arguments: Any) -> None:
        """Replace the parameters of foreign stages by tensors without data, on the device of the model's arguments."""
        if not self._foreign_parameters:
            return
        device = _device_of(arguments)
        if device != self._device:
            self._device = device
            for module, leaf, shape in self._foreign_parameters:
                object.__setattr__(module, leaf, _fake(shape, device))

    def _layer(self, index: int, layer: Any, args: Any, kwargs: Any) -> Any:
        start, stop = self._range()
        if index < start:
            return self._received
        if index == start and any(isinstance(x, FakeTensor) for x in tensors_of((args, kwargs))):
            raise RuntimeError(
                f"{self.cut.layers[index]} reads a value of which stage {self._running} has the shape alone: a module "
                f"of earlier stages computes the value, in a way that autograd does not follow on shapes; pass the "
                f"value on from layer to layer"
            )
        output = layer(*args, **kwargs)
        if index == stop - 1 and stop < len(self.cut.layers):
            raise _StageEnd(output)
        return output

    def _outer(self, stages: frozenset[int], shapes: Any, outer: Any, args: Any, kwargs: Any) -> Any:
        self._range()
        return outer(*args, **kwargs) if self._running in stages else shapes(*args, **kwargs)

    def _range(self) -> tuple[int, int]:
        if self._running is None:
            raise RuntimeError(
                f"the model is cut into {len(self.cut.ranges)} stages, of which this rank holds "
                f"{', '.join(map(str, self.own))}: the model cannot be called alone; use "
                f"forward_backward(model, criterion, tokens, targets)"
            )
        return self.cut.ranges[self._running]

    def _remove_foreign(self, model: nn.Module) -> None:
        """Remove the parameters not used by this rank's stages, and the buffers of modules not used by these stages."""
        own = set(self.own)
        first = {parameter: name for name, parameter in model.named_parameters()}
        stages_of = {name: {stage} for stage, (a, b) in enumerate(self.cut.ranges) for name in self.cut.layers[a:b]}
        stages_of |= {name: set(stages) for name, stages in self.cut.outer_modules.items()}
        for name, module in model.named_modules():
            enclosing = next((each for each in stages_of if f"{name}.".startswith(f"{each}.")), None)
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if self.cut.parameters[first[parameter]] & own:
                    continue
                if enclosing is None:  # the forward of a module around the layers reads this parameter's shape
                    del module._parameters[leaf]
                    self._foreign_parameters.append((module, leaf, parameter.detach().to("meta")))
                else:
                    module.register_parameter(leaf, None)
            if enclosing is not None and not stages_of[enclosing] & own:
                for leaf in list(module._buffers):
                    module._buffers[leaf] = None


def _route_calls(module: nn.Module, answer: Any) -> None:
    """Make each call of the module return `answer(run, args, kwargs)`.

    run: the module's original call, with hooks and compiled code.
    """
    kind: Any = type(module)
    module.__class__ = _routed_class(kind)
    object.__setattr__(module, "_called", answer)


@lru_cache(maxsize=1024)
def _routed_class(kind: Any) -> Any:
    """A subclass of `kind`, of the same name, whose calls go to the instance's attribute `_called`.

    torch's fully_shard swaps classes in this way, too: names of modules and isinstance() work as before.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._called(super(subclass, self).__call__, args, kwargs)

    subclass: Any = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    return subclass


@cache
def _shape_mode() -> FakeTensorMode:
    """The mode in which tensors without data are computed. Made at first use, since making the mode loads Dynamo
    and Triton.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def _device_of(arguments: Any) -> torch.device:
    return next((x.device for x in tensors_of(arguments)), torch.device("cpu"))


def _fake(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of x's shape without data on `device`; for a DTensor, of its global shape."""
    with torch.inference_mode(False), _shape_mode():  # the tensor may be cached and used again in training
        return torch.empty(x.shape, dtype=x.dtype, device=device)


class _Absent:
    """Stands for a module that this rank's stage does not use: a copy without data, which computes shapes of outputs.

    Outputs are cached by `_kind`, since an op on shapes takes the host ten times as long as on small tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = _copy_with(module, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")).eval()
        self._by_device: dict[torch.device, nn.Module] = {}  # the copy for each device
        self._outputs: dict[Any, Any] = {}  # by the `_kind` of arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = _kind((args, kwargs))
        if kind is None:
            return self._call(args, kwargs)
        if kind not in self._outputs:
            if len(self._outputs) == KINDS:  # for example, a number among the arguments changes at every step
                self._outputs.clear()
            self._outputs[kind] = self._call(args, kwargs)
        return self._outputs[kind]

    def _call(self, args: Any, kwargs: Any) -> Any:
        device = _device_of((args, kwargs))
        if device not in self._by_device:
            self._by_device[device] = _copy_with(self._module, lambda x: _fake(x, device))
        with torch.inference_mode(False), torch.no_grad():
            shapes = tree_map(lambda x: _fake(x, device) if isinstance(x, DTensor) else x, (args, kwargs))
            return self._by_device[device](*shapes[0], **shapes[1])


def _kind(arguments: Any) -> Any:
    """A cache key: equal keys of arguments (args, kwargs) give outputs of equal shapes.

    None, for no caching, where the arguments hold more than tensors and plain values.
    """
    args, kwargs = arguments
    if not kwargs and all(isinstance(x, Tensor) for x in args):
        return tuple([(x.shape, x.dtype, x.device) for x in args])
    leaves, structure = tree_flatten(arguments)
    if not all(isinstance(x, Tensor | bool | int | float | str | None) for x in leaves):
        return None
    kinds = ((tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves)
    return str(structure), *kinds


def _copy_with(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of the module in which `make(tensor)` replaces each parameter and buffer."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        replacement = make(tensor)
        memo[id(tensor)] = (
            nn.Parameter(replacement, requires_grad=False) if isinstance(tensor, nn.Parameter) else replacement
        )
    return copy.deepcopy(module, memo)
