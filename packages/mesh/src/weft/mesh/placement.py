"""Placements: the effect of a mesh axis on a tensor. Shard, Replicate or Partial."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .arguments import as_int

REDUCTIONS = ("sum", "avg", "min", "max", "product")


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts dim `dim` as `torch.chunk` does; a negative dim counts from the end, -1 being the last."""

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", as_int("the dim of Shard", self.dim))

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the reduction by `op` of the values on the ranks along the axis."""

    op: str = "sum"  #: see REDUCTIONS; torch's "prod" becomes "product"

    def __post_init__(self) -> None:
        if self.op == "prod":
            object.__setattr__(self, "op", "product")
        if self.op not in REDUCTIONS:
            raise ValueError(f"Partial has no op {self.op!r}; use one of {', '.join(REDUCTIONS)}")

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Shard | Replicate | Partial

_TEXT = re.compile(r"R|S\((-?\d+)\)|P(?:\((\w+)\))?", re.ASCII)


def _parse_placement(text: str) -> Placement:
    """The placement printed as `text`: "R", "S(0)", "P(sum)"; "P" means "P(sum)".

    Raises ValueError for any other text.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a placement; write R, S(dim) or P(op), such as S(0) or P(sum)")
    dim, op = match.groups()
    if dim is not None:
        return Shard(int(dim))
    return Partial(op or "sum") if match[0].startswith("P") else Replicate()


def as_placement(value: Any) -> Placement:
    """`value` as Shard, Replicate or Partial; text like "S(0)" and torch's own placements are taken too.

    torch is not imported: its placements are recognized by their class names, and read by public attributes.
    """
    if isinstance(value, Shard | Replicate | Partial):
        return value
    if isinstance(value, str):
        return _parse_placement(value)
    match type(value).__name__:
        case "Shard":
            return Shard(value.dim)
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(value.reduce_op)
    raise ValueError(f"{value!r} is not a placement; give Shard(dim), Replicate(), Partial(op) or their text")
