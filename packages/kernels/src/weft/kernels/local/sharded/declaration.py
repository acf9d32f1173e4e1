"""The layouts declared for a function on local tensors: placements by mesh axis, for inputs, outputs and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.mesh import Layout, Partial, Placement, ProcessMesh, Replicate, Shard, as_placement
from weft.mesh.extension import axes_of

Placed = Mapping[str, Placement]  # mesh axis name -> placement; replicated over axes not named


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The layouts declared for a function by `on_local_tensors`, valid for any mesh. Checked when made."""

    name: str  # of the function
    parameters: tuple[str, ...]  # the function's parameters, in order
    inputs: Mapping[str, Placed]  # by parameter
    outputs: tuple[Placed, ...]  # in order
    many: bool  # whether the function returns a tuple
    gradients: Mapping[str, Placed]  # by parameter, only where declared

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Any, outputs: Any, gradients: Any) -> Declaration:
        """Make a declaration from the arguments of `on_local_tensors`. Raises ValueError if they do not fit."""
        name = getattr(function, "__name__", type(function).__name__)
        parameters = tuple(inspect.signature(function).parameters)
        many = not isinstance(outputs, Mapping)
        if many and not isinstance(outputs, Sequence):
            raise ValueError(f"{name}: out_layouts is {outputs!r}; give placements by axis, or a sequence of them")
        declaration = cls(
            name=name,
            parameters=parameters,
            inputs=_by_parameter(name, "in_layouts", parameters, inputs),
            outputs=tuple(_placed(name, "out_layouts", each) for each in (outputs if many else [outputs])),
            many=many,
            gradients=_by_parameter(name, "grad_layouts", parameters, gradients or {}),
        )
        declaration._check_axes()
        return declaration

    def _check_axes(self) -> None:
        axes = {axis for placed in self.outputs for axis in placed}
        for axis in sorted(axes):
            inputs = [placed.get(axis, Replicate()) for placed in self.inputs.values()]
            outputs = [placed.get(axis, Replicate()) for placed in self.outputs]
            if all(isinstance(each, Replicate) for each in inputs):
                first = next((each for each in outputs if not isinstance(each, Replicate)), None)
                if first is not None:
                    raise ValueError(
                        f"{self.name}: an output is {first} on axis {axis!r}, where all inputs replicate: every rank "
                        f"computes the same. Declare the output R, and reshard it after the call"
                    )
            elif len(set(map(type, outputs))) > 1 and Replicate() in outputs and Replicate() in inputs:
                missing = [name for name, placed in self.inputs.items() if placed.get(axis, Replicate()) == Replicate()]
                missing = [name for name in missing if name not in self.gradients]
                if missing:
                    raise ValueError(
                        f"{self.name}: on axis {axis!r} one output is sharded or partial and another replicated, so "
                        f"the gradient of {missing[0]!r}, which is R there, has no evident layout; give one in "
                        f"grad_layouts"
                    )

    def input(self, parameter: str, mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
        """The declared layout of an input, on `mesh`."""
        return _layout(mesh, self.inputs[parameter], shape)

    def output(self, number: int, mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
        """The declared layout of output `number`, on `mesh`."""
        return _layout(mesh, self.outputs[number], shape)

    def gradient(self, parameter: str, mesh: ProcessMesh, shape: Sequence[int]) -> Layout | None:
        """The declared layout of an input's gradient, on `mesh`; None if not declared."""
        placed = self.gradients.get(parameter)
        return None if placed is None else _layout(mesh, placed, shape)


def _layout(mesh: ProcessMesh, placed: Placed, shape: Sequence[int]) -> Layout:
    named = {own: placement for axis, placement in placed.items() for own in axes_of(mesh, axis)}
    return Layout.in_order(mesh, named).resolved(shape)


def _by_parameter(name: str, what: str, parameters: tuple[str, ...], given: Any) -> dict[str, Placed]:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) > len(parameters):
            raise ValueError(f"{name}: {what} has {len(given)} entries; the function takes {', '.join(parameters)}")
        given = {parameter: each for parameter, each in zip(parameters, given, strict=False) if each is not None}
    if not isinstance(given, Mapping):
        raise ValueError(f'{name}: {what} is {given!r}; give placements by parameter, as in {{"x": {{"tp": "S(1)"}}}}')
    for parameter in given:
        if parameter not in parameters:
            raise ValueError(f"{name}: {what} names {parameter!r}; the function takes {', '.join(parameters)}")
    return {parameter: _placed(name, what, each) for parameter, each in given.items()}


def _placed(name: str, what: str, given: Any) -> dict[str, Shard | Replicate | Partial]:
    if not isinstance(given, Mapping) or not all(isinstance(axis, str) for axis in given):
        raise ValueError(f'{name}: {what} has {given!r}; give placements by axis, as in {{"tp": "S(1)"}}')
    try:
        return {axis: as_placement(placement) for axis, placement in given.items()}
    except ValueError as error:
        raise ValueError(f"{name}: {what}: {error}") from None
