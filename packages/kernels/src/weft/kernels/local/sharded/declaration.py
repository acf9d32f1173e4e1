"""The layouts declared for a function on local tensors: placements by mesh axis, for inputs, outputs and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.mesh import Layout, Partial, Placement, ProcessMesh, Replicate, Shard, as_placement
from weft.mesh.extension import axes_of

DeclaredPlacements = Mapping[str, Placement]  # mesh axis name -> placement; replicated over axes not named


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The layouts declared for a function decorated by `on_local_tensors`, which makes and reads the declaration.

    Valid for any mesh. Checked when made, at decoration.
    """

    name: str  # of the function
    parameters: tuple[str, ...]  # the function's parameters, in order
    inputs: Mapping[str, DeclaredPlacements]  # by parameter; a parameter without an entry takes no DTensor
    outputs: tuple[DeclaredPlacements, ...]  # in order
    is_tuple: bool  # whether the function returns a tuple
    gradients: Mapping[str, DeclaredPlacements]  # by parameter, only where declared

    @classmethod
    def from_function(cls, function: Callable[..., Any], inputs: Any, outputs: Any, gradients: Any) -> Declaration:
        """Make a declaration from the arguments of `on_local_tensors`. Raises ValueError if they do not fit."""
        name = getattr(function, "__name__", type(function).__name__)
        parameters = tuple(inspect.signature(function).parameters)
        is_tuple = not isinstance(outputs, Mapping)
        if is_tuple and not isinstance(outputs, Sequence):
            raise ValueError(f"{name}: out_layouts is {outputs!r}; give placements by axis, or a sequence of them")
        declaration = cls(
            name=name,
            parameters=parameters,
            inputs=_parse_by_parameter(name, "in_layouts", parameters, inputs),
            outputs=tuple(
                _parse_placements(name, "out_layouts", each) for each in (outputs if is_tuple else [outputs])
            ),
            is_tuple=is_tuple,
            gradients=_parse_by_parameter(name, "grad_layouts", parameters, gradients or {}),
        )
        declaration._check_axes()
        return declaration

    def _check_axes(self) -> None:
        """Raise ValueError in two cases.

        On an axis over which all inputs are replicated, an output is sharded or Partial: ranks with equal inputs would
        compute equal outputs. Or a replicated input's gradient could be Partial or replicated, and `gradients` does not
        tell which.
        """
        axes = {axis for placements in self.outputs for axis in placements}
        for axis in sorted(axes):
            inputs = [placements.get(axis, Replicate()) for placements in self.inputs.values()]
            outputs = [placements.get(axis, Replicate()) for placements in self.outputs]
            if all(isinstance(each, Replicate) for each in inputs):
                first = next((each for each in outputs if not isinstance(each, Replicate)), None)
                if first is not None:
                    raise ValueError(
                        f"{self.name}: an output is {first} on axis {axis!r}, where all inputs replicate: every rank "
                        f"computes the same. Declare the output R, and reshard it after the call"
                    )
            elif len(set(map(type, outputs))) > 1 and Replicate() in outputs and Replicate() in inputs:
                missing = [
                    name
                    for name, placements in self.inputs.items()
                    if placements.get(axis, Replicate()) == Replicate() and name not in self.gradients
                ]
                if missing:
                    raise ValueError(
                        f"{self.name}: on axis {axis!r} one output is sharded or partial and another replicated, so "
                        f"the gradient of {missing[0]!r}, which is R there, has no evident layout; give one in "
                        f"grad_layouts"
                    )

    def input(self, parameter: str, mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
        """The declared layout of an input, on `mesh`. shape: global; negative dims count from its end."""
        return _layout(mesh, self.inputs[parameter], shape)

    def output(self, number: int, mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
        """The declared layout of output `number`, on `mesh`. shape: of the global output."""
        return _layout(mesh, self.outputs[number], shape)

    def gradient(self, parameter: str, mesh: ProcessMesh, shape: Sequence[int]) -> Layout | None:
        """The declared layout of an input's gradient, on `mesh`; None if not declared. shape: of the global input."""
        placements = self.gradients.get(parameter)
        return None if placements is None else _layout(mesh, placements, shape)


def _layout(mesh: ProcessMesh, placements: DeclaredPlacements, shape: Sequence[int]) -> Layout:
    """The layout with these placements on `mesh`.

    Where the mesh splits an axis into parts (tp into tp_heads, ...), the axis's placement holds for every part.
    """
    by_axis = {part: placement for axis, placement in placements.items() for part in axes_of(mesh, axis)}
    return Layout.in_order(mesh, by_axis).resolved(shape)


def _parse_by_parameter(name: str, what: str, parameters: tuple[str, ...], value: Any) -> dict[str, DeclaredPlacements]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) > len(parameters):
            raise ValueError(f"{name}: {what} has {len(value)} entries; the function takes {', '.join(parameters)}")
        value = {parameter: each for parameter, each in zip(parameters, value, strict=False) if each is not None}
    if not isinstance(value, Mapping):
        raise ValueError(f'{name}: {what} is {value!r}; give placements by parameter, as in {{"x": {{"tp": "S(1)"}}}}')
    for parameter in value:
        if parameter not in parameters:
            raise ValueError(f"{name}: {what} names {parameter!r}; the function takes {', '.join(parameters)}")
    return {parameter: _parse_placements(name, what, each) for parameter, each in value.items()}


def _parse_placements(name: str, what: str, value: Any) -> dict[str, Shard | Replicate | Partial]:
    if not isinstance(value, Mapping) or not all(isinstance(axis, str) for axis in value):
        raise ValueError(f'{name}: {what} has {value!r}; give placements by axis, as in {{"tp": "S(1)"}}')
    try:
        return {axis: as_placement(placement) for axis, placement in value.items()}
    except ValueError as error:
        raise ValueError(f"{name}: {what}: {error}") from None
