"""What is declared of a function on local tensors: placements by axis, of its inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.mesh import Layout, Partial, Placement, ProcessMesh, Replicate, Shard, as_placement
from weft.mesh.refinement import axes_of

Placed = Mapping[str, Placement]  # by the name of an axis; the others replicate


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Checked when it is made, on any mesh.

    name: of the function. parameters: its own, in order. inputs: by parameter. outputs: of each; None for what is no tensor.
    many: whether it returns a tuple. gradients: by parameter, where they do not follow from inputs and outputs.
    """

    name: str
    parameters: tuple[str, ...]
    inputs: Mapping[str, Placed]
    outputs: tuple[Placed, ...]
    many: bool
    gradients: Mapping[str, Placed]

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Any, outputs: Any, gradients: Any) -> Declaration:
        """Raises ValueError for what is no declaration of this function."""
        name = getattr(function, "__name__", type(function).__name__)
        parameters = tuple(inspect.signature(function).parameters)
        many = not isinstance(outputs, Mapping)
        if many and not isinstance(outputs, Sequence):
            raise ValueError(f"{name}: out_layouts is {outputs!r}; give placements by axis, or a sequence of them")
        made = cls(
            name=name,
            parameters=parameters,
            inputs=_by_parameter(name, "in_layouts", parameters, inputs),
            outputs=tuple(_placed(name, "out_layouts", each) for each in (outputs if many else [outputs])),
            many=many,
            gradients=_by_parameter(name, "grad_layouts", parameters, gradients or {}),
        )
        made._check_axes()
        return made

    def _check_axes(self) -> None:
        axes = {axis for placed in self.outputs for axis in placed}
        for axis in sorted(axes):
            inputs = [placed.get(axis, Replicate()) for placed in self.inputs.values()]
            outputs = [placed.get(axis, Replicate()) for placed in self.outputs]
            if all(isinstance(each, Replicate) for each in inputs):
                cut = next((each for each in outputs if not isinstance(each, Replicate)), None)
                if cut is not None:
                    raise ValueError(
                        f"{self.name}: an output is {cut} on axis {axis!r}, where all inputs replicate: every rank computes the "
                        f"same. Declare it R, and reshard what the function returns"
                    )
            elif len(set(map(type, outputs))) > 1 and Replicate() in outputs and Replicate() in inputs:
                missing = [name for name, placed in self.inputs.items() if placed.get(axis, Replicate()) == Replicate()]
                missing = [name for name in missing if name not in self.gradients]
                if missing:
                    raise ValueError(
                        f"{self.name}: on axis {axis!r} one output is cut and another is not, so the layout of the gradient of "
                        f"{missing[0]!r}, which is R there, does not follow; give it in grad_layouts"
                    )

    def input(self, parameter: str, mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
        """How that input lies on a mesh."""
        return _layout(mesh, self.inputs[parameter], shape)

    def output(self, number: int, mesh: ProcessMesh, shape: Sequence[int]) -> Layout:
        """How that output lies on a mesh."""
        return _layout(mesh, self.outputs[number], shape)

    def gradient(self, parameter: str, mesh: ProcessMesh, shape: Sequence[int]) -> Layout | None:
        """How that input's gradient lies on a mesh, where it was declared."""
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
