"""What a plan says of a module: how its parameters lie, and how what it takes and gives does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.mesh import Placement, as_placement

DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "dp", "cp", "tp", "pp"
TOKENS_DIM = 1  # activations are [B, T, ...]


@dataclass(frozen=True, slots=True)
class ColwiseParallel:
    """A linear layer cut along its output: weight S(0), bias S(0); its input is whole, its output sharded.

    Column-parallel siblings that are given one tensor bring it to their layout once.
    """


@dataclass(frozen=True, slots=True)
class RowwiseParallel:
    """A linear layer cut along its input: weight S(1), bias whole; its output is Partial, and reduced at once."""


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """An embedding cut along the vocabulary: table S(0); its output is Partial, and reduced at once."""


@dataclass(frozen=True, slots=True)
class PositionParallel:
    """An embedding of positions, [T] or [B, T], whole; with `sequence` its input is cut along the tokens, as what it is added to.

    Each rank then looks up the positions of its own tokens, and the table's gradient is Partial.
    """


Placed = Mapping[str, Any]  # by the name of an axis: a placement of ours, of torch's, or its text
Where = str | int | None


@dataclass(frozen=True, slots=True, repr=False)
class PrepareInput:
    """Inputs of a module of any kind, brought to declared placements before its forward.

    layouts: by the name of forward's parameter, or its position, the placement on each axis that is named:
        `PrepareInput({"x": {"tp": "R"}, "mask": {"tp": Shard(0)}})`. On other axes an input stays as it lies; a plain
        tensor counts as replicated; what is no tensor, or is not given, is left alone.
    Communication: the reshard of each input, and in backward that of its gradient to the layout that it came in.
    Raises ValueError for anything else than placements by axes by inputs.
    """

    layouts: Mapping[str | int, Placed]

    def __post_init__(self) -> None:
        if not isinstance(self.layouts, Mapping) or not self.layouts:
            raise ValueError(
                f'PrepareInput takes placements by input and axis, as in {{"x": {{"tp": "R"}}}}, got {self.layouts!r}'
            )
        checked = {where: _placed(f"PrepareInput of {where!r}", each) for where, each in self.layouts.items()}
        object.__setattr__(self, "layouts", checked)

    def __repr__(self) -> str:
        return f"PrepareInput({ {where: _words(each) for where, each in self.layouts.items()} })"


@dataclass(frozen=True, slots=True, repr=False)
class PrepareOutput:
    """Outputs of a module of any kind, brought to declared placements after its forward.

    layouts: of one output the placement on each axis that is named, `PrepareOutput({"tp": "R"})`; of several, which are a
        tuple or a mapping, those by position or key: `PrepareOutput({0: {"tp": "R"}, "hidden": {"tp": "S(1)"}})`. On other
        axes an output stays as it lies. Beside a style whose output is reduced it says what it is reduced to.
    Communication: the reshard of each output, and in backward that of its gradient.
    Raises ValueError for anything else than placements by axes, or those by outputs.
    """

    layouts: Mapping[Any, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.layouts, Mapping) or not self.layouts:
            raise ValueError(f'PrepareOutput takes placements by axis, as in {{"tp": "R"}}, got {self.layouts!r}')
        several = [where for where, each in self.layouts.items() if isinstance(each, Mapping)]
        if several and len(several) < len(self.layouts):
            raise ValueError(f"PrepareOutput has placements of one output and of several, {self.layouts!r}; give one")
        if several:
            checked: Any = {where: _placed(f"PrepareOutput of {where!r}", each) for where, each in self.layouts.items()}
        else:
            checked = _placed("PrepareOutput", self.layouts)
        object.__setattr__(self, "layouts", checked)

    @property
    def by_output(self) -> dict[Where, Placed]:
        """The placements of each output that has some: by position or key, by None where there is one output alone."""
        several = any(isinstance(each, Mapping) for each in self.layouts.values())
        return dict(self.layouts) if several else {None: self.layouts}

    def __repr__(self) -> str:
        shown = {where: _words(each) for where, each in self.by_output.items()}
        return f"PrepareOutput({shown.get(None, shown)})"


Style = ColwiseParallel | RowwiseParallel | VocabParallel | PositionParallel
Preparation = PrepareInput | PrepareOutput


def as_styles(pattern: str, given: object) -> tuple[Style | Preparation, ...]:
    """What a pattern of a plan is given, a style or several. Raises ValueError for what is none."""
    styles = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for style in styles:
        if not isinstance(style, Style | Preparation):
            made = f"; write {style.__name__}()" if isinstance(style, type) and issubclass(style, Style) else ""
            raise ValueError(
                f"plan pattern {pattern!r} is given {style!r}, which is no style: ColwiseParallel(), RowwiseParallel(), "
                f"VocabParallel(), PositionParallel(), PrepareInput(…), PrepareOutput(…), or several of them{made}"
            )
    return styles


def _placed(what: str, given: object) -> dict[str, Placement]:
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f'{what} is {given!r}; give placements by axis, as in {{"tp": "S(1)"}}')
    for axis in given:
        if not isinstance(axis, str):
            raise ValueError(f'{what} names axis {axis!r}; give the name of an axis, as in {{"tp": "S(1)"}}')
    try:
        return {axis: as_placement(placement) for axis, placement in given.items()}
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _words(placed: Placed) -> dict[str, str]:
    return {axis: str(placement) for axis, placement in placed.items()}
