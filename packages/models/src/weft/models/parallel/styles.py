"""Styles, which a plan gives to modules, and the mesh axes that plans know by name.

A style states the layout of a module's parameters, inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.mesh import Placement, ProcessMesh, as_placement

DATA_AXIS_NAMES = ("dp", "data", "batch", "replica", "shard")  # names that plans take for axes of data

# The axis names of Weft's own meshes. A data axis may have any of DATA_AXIS_NAMES; "cp", "tp" and "pp" are fixed.
DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "dp", "cp", "tp", "pp"
EXPERT_AXIS = "ep"  # only on the experts' mesh; see experts/placement.py
TOKENS_DIM = 1  # activations are [B, T, ...]


@dataclass(frozen=True, slots=True)
class ColwiseParallel:
    """A linear layer split along the outputs: weight S(0), bias S(0), input replicated, output sharded.

    Column-parallel siblings called with the same tensor reshard this tensor once.
    """


@dataclass(frozen=True, slots=True)
class RowwiseParallel:
    """A linear layer split along the inputs: weight S(1), bias replicated.

    The output is Partial; a forward hook reduces it: all-reduce, or reduce-scatter with `ParallelPlan.sequence`.
    """


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """An embedding split along the vocabulary: table S(0). The Partial output is reduced as by `RowwiseParallel`."""


@dataclass(frozen=True, slots=True)
class PositionParallel:
    """An embedding of positions [T] or [B, T] whose table is replicated.

    In a plan with `ParallelPlan.sequence`, the positions are sharded along the tokens, like the activations to which
    the embedding is added. Each rank then looks up the positions of its own tokens only, and the table's gradient is
    Partial.
    """


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The experts of a mixture split inside each expert: gate_proj and up_proj S(1), down_proj S(2).

    The tokens, and the weights of their experts, are replicated; their gradients are reduced. The output is Partial
    and reduced as by `RowwiseParallel`.
    """


PlacementsByAxis = Mapping[str, Any]  # mesh axis -> placement: Weft's, torch's, or text
OutputKey = str | int | None  # an output's key or position; None for the only output


@dataclass(frozen=True, slots=True, repr=False)
class PrepareInput:
    """Reshard a module's inputs to declared placements before forward; for modules of any kind.

    layouts: for each input, by the name or position of forward's parameter, the placement on each axis, as in
        `PrepareInput({"x": {"tp": "R"}, "mask": {"tp": Shard(0)}})`. On axes not named, an input keeps its
        placement. A plain tensor counts as replicated. Arguments other than tensors, and arguments not passed, are
        left alone.
    Communication: the reshard of each input; in backward, the reshard of its gradient back to the layout in which
    the caller passed the input.
    Raises ValueError if `layouts` does not map inputs to placements by axis.
    """

    layouts: Mapping[str | int, PlacementsByAxis]

    def __post_init__(self) -> None:
        if not isinstance(self.layouts, Mapping) or not self.layouts:
            raise ValueError(
                f'PrepareInput takes placements by input and axis, as in {{"x": {{"tp": "R"}}}}, got {self.layouts!r}'
            )
        checked = {where: _parse_placements(f"PrepareInput of {where!r}", each) for where, each in self.layouts.items()}
        object.__setattr__(self, "layouts", checked)

    def __repr__(self) -> str:
        return f"PrepareInput({ {where: _texts(each) for where, each in self.layouts.items()} })"


@dataclass(frozen=True, slots=True, repr=False)
class PrepareOutput:
    """Reshard a module's outputs to declared placements after forward; for modules of any kind.

    layouts: for a module with one output, the placement on each axis: `PrepareOutput({"tp": "R"})`. For a module
        returning a tuple or a mapping, these placements by position or key: `PrepareOutput({0: {"tp": "R"},
        "hidden": {"tp": "S(1)"}})`. On axes not named, an output keeps its placement. If the module also has a
        style whose output is Partial, such as RowwiseParallel, the output is reduced to the placement declared here.
    Communication: the reshard of each output; in backward, the reshard of the gradient.
    Raises ValueError if `layouts` maps neither axes to placements nor outputs to placements by axis.
    """

    layouts: Mapping[Any, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.layouts, Mapping) or not self.layouts:
            raise ValueError(f'PrepareOutput takes placements by axis, as in {{"tp": "R"}}, got {self.layouts!r}')
        several = [where for where, each in self.layouts.items() if isinstance(each, Mapping)]
        if several and len(several) < len(self.layouts):
            raise ValueError(
                f"PrepareOutput has placements of one output and of several, {self.layouts!r}; give either, not both"
            )
        if several:
            checked: Any = {
                where: _parse_placements(f"PrepareOutput of {where!r}", each) for where, each in self.layouts.items()
            }
        else:
            checked = _parse_placements("PrepareOutput", self.layouts)
        object.__setattr__(self, "layouts", checked)

    @property
    def placements_by_output(self) -> dict[OutputKey, PlacementsByAxis]:
        """The placements of each prepared output, by position or key; the key is None for a module's only output."""
        several = any(isinstance(each, Mapping) for each in self.layouts.values())
        return dict(self.layouts) if several else {None: self.layouts}

    def __repr__(self) -> str:
        shown = {where: _texts(each) for where, each in self.placements_by_output.items()}
        return f"PrepareOutput({shown.get(None, shown)})"


Style = ColwiseParallel | RowwiseParallel | VocabParallel | PositionParallel | ExpertParallel
Preparation = PrepareInput | PrepareOutput


def as_styles(pattern: str, value: object) -> tuple[Style | Preparation, ...]:
    """The styles of a pattern in a plan, as a tuple. value: a style or a sequence of styles.

    Raises ValueError for any other value.
    """
    styles = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    for style in styles:
        if not isinstance(style, Style | Preparation):
            hint = f"; write {style.__name__}()" if isinstance(style, type) and issubclass(style, Style) else ""
            raise ValueError(
                f"plan pattern {pattern!r} is given {style!r}, which is no style; use ColwiseParallel(), "
                f"RowwiseParallel(), VocabParallel(), PositionParallel(), ExpertParallel(), PrepareInput(…), "
                f"PrepareOutput(…), or a sequence of styles{hint}"
            )
    return styles


def _parse_placements(what: str, placements: object) -> dict[str, Placement]:
    """Check placements by axis and parse each placement. what: the style and the input or output, for errors."""
    if not isinstance(placements, Mapping) or not placements:
        raise ValueError(f'{what} is {placements!r}; give placements by axis, as in {{"tp": "S(1)"}}')
    for axis in placements:
        if not isinstance(axis, str):
            raise ValueError(f'{what} names axis {axis!r}; give the name of an axis, as in {{"tp": "S(1)"}}')
    try:
        return {axis: as_placement(placement) for axis, placement in placements.items()}
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _texts(placed: PlacementsByAxis) -> dict[str, str]:
    return {axis: str(placement) for axis, placement in placed.items()}


def check_mesh_axes(mesh: ProcessMesh, *, pipeline: bool = False) -> None:
    """Raise ValueError for a mesh axis with a name unknown to plans, which would otherwise count as a data axis.

    An axis of size 1 does nothing and may have any name.
    pipeline: whether the plan cuts the model along "pp".
    """
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size == 1 or _is_known(axis):
            continue
        if axis == PIPELINE_AXIS and pipeline:
            continue
        if axis == PIPELINE_AXIS:
            raise ValueError(
                f"{mesh} has an axis 'pp', and the plan has no pipeline; say how the model is cut, by "
                f"ParallelPlan(pipeline=PipelinePlan(...)), or lay out one stage alone, on "
                f"mesh.get_mesh_with_dim('pp', 0)"
            )
        if axis == EXPERT_AXIS:
            raise ValueError(
                f"{mesh} has an axis {axis!r}; experts lie on a mesh of their own, made by the plan: leave the axis "
                f"out here, and give ParallelPlan(experts=ExpertPlan(size={size}))"
            )
        raise ValueError(
            f"{mesh} has an axis {axis!r}, which a plan does not know; {_known_axes()}. Rename it, as by "
            f"mesh.rename({axis}={TENSOR_AXIS!r})"
        )


def check_style_axes(mesh: ProcessMesh, axes: Iterable[str], where: str) -> None:
    """Raise ValueError for a style's axis neither on the mesh nor known to plans. where: the style, for the error."""
    for axis in axes:
        if axis not in mesh.axis_names and not _is_known(axis):
            raise ValueError(
                f"{where} names axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}, and {_known_axes()}; "
                f"a known axis that the mesh lacks counts as size 1"
            )


def _is_known(axis: str) -> bool:
    return axis in (CONTEXT_AXIS, TENSOR_AXIS) or is_data_axis(axis)


def is_data_axis(axis: str) -> bool:
    """Whether an axis of this name shards the rows of a batch and nothing else."""
    return axis in DATA_AXIS_NAMES or axis.startswith(tuple(f"{name}_" for name in DATA_AXIS_NAMES))


def _known_axes() -> str:
    """The axis names known to plans, as the end of an error message."""
    return (
        f"the names are {TENSOR_AXIS} (tensor), {CONTEXT_AXIS} (context) and, for data, {', '.join(DATA_AXIS_NAMES)}, "
        f"or parts of the data axes such as dp_replica"
    )
