"""A parallel plan: how a module tree is laid out, as a value of wildcard names and styles."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

from .styles import Style, VocabParallel

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How a model is laid out on a mesh.

    tensor: module names with wildcards, as in "layers.*.mlp.up_proj", and the style of each, along the axis "tp".
    sequence: between the parallel layers the activations are sharded on the tokens (dim 1) over "tp": the all-reduces
        become reduce-scatter and all-gather pairs at the same places; nothing else need be said.
    loss_parallel: the logits stay sharded on the vocabulary, for a loss that takes them so.
    recompute: what backward computes again in place of keeping it, block by block: "full", each block; "selective", all but
        its products by weights and what was communicated. The bits are the same.
    blocks: names of the blocks, with wildcards; of modules that lie within one another the outermost.
    """

    tensor: Mapping[str, Style] = field(default_factory=dict)
    sequence: bool = False
    loss_parallel: bool = True
    recompute: Recompute = "none"
    blocks: tuple[str, ...] = ("layers.*",)

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise ValueError(
                f"ParallelPlan: recompute is {self.recompute!r}; it must be one of {', '.join(map(repr, get_args(Recompute)))}"
            )

    def __str__(self) -> str:
        lines = [f"{pattern}: {style!r}" for pattern, style in self.tensor.items()]
        return "\n".join(
            [*lines, *(f"{each}: {getattr(self, each)}" for each in ("sequence", "loss_parallel", "recompute"))]
        )


def resolve(model: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """The style of every module that the plan names, in the model's order.

    Raises ValueError for a pattern that matches no module, naming the nearest that there are; for a module that two
    patterns give different styles; for a style that the module's kind does not have.
    """
    modules = dict(model.named_modules())
    styles: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.tensor.items():
        names = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"plan pattern {pattern!r} matches no module of {type(model).__name__}; "
                f"the nearest names are {nearest(pattern, list(modules)[1:])}"
            )
        for name in names:
            earlier, other = styles.setdefault(name, (pattern, style))
            if other != style:
                raise ValueError(
                    f"plan patterns {earlier!r} and {pattern!r} give {name!r} two styles: {other} and {style}"
                )
            kind = nn.Embedding if isinstance(style, VocabParallel) else nn.Linear
            if not isinstance(modules[name], kind):
                raise ValueError(
                    f"plan pattern {pattern!r} gives {style} to {name!r}, a {type(modules[name]).__name__}; "
                    f"that style is for {kind.__name__} layers"
                )
    return {name: styles[name][1] for name in modules if name in styles}


def nearest(pattern: str, names: Sequence[str]) -> str:
    """For an error: the names that come nearest to a pattern that matches none."""
    return ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3])
