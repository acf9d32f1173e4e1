"""What a plan says of a module: how its parameters lie, and what it takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_AXIS = "tp"


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
    """An embedding of positions, whole; where the plan has `sequence` its input is cut along the tokens, as what it is added to.

    Its input is the positions, [T] or [B, T].
    """


Style = ColwiseParallel | RowwiseParallel | VocabParallel | PositionParallel
