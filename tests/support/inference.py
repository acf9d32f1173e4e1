"""The proof of a layout rule by brute force: what it takes is right, and what it refuses is wrong whatever it answered.

The operation runs on every rank's part, and the whole is put together again by the oracle of `shards`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh

from .shards import every_layout, rebuild, split

PARTIALS = tuple(map(Partial, ("sum", "avg", "min", "max", "product")))


@dataclass(frozen=True)
class Trial:
    """One operation on one set of operands; of a rule for many operations, one of those.

    local: (rank, layouts, *parts) -> this rank's part of the output. whole: of the whole operands.
    """

    local: Callable[..., Tensor]
    whole: Tensor
    operands: Sequence[Tensor]


def trials(op: Callable[..., Tensor], *operands: Sequence[Tensor]) -> list[Trial]:
    """One for each set of operands, of an operation that knows no ranks."""
    return [Trial(lambda rank, layouts, *parts: op(*parts), op(*each), each) for each in operands]


def prove(
    rule: Callable[..., Layout],
    tried: Sequence[Trial],
    mesh: ProcessMesh,
    *,
    partials: Sequence[Partial] = PARTIALS,
    reshaped: bool = False,
) -> int:
    """How many combinations of layouts the rule takes; AssertionError for one that it takes or refuses wrongly.

    rule: from the operands' layouts. What it answers must be right in every trial; where it refuses, every answer, Partial
    by `partials` too, must be wrong in one. reshaped: parts count as of the shape that a layout asks for, if they have as many elements.
    """
    shape = tried[0].whole.shape
    every = [_layouts(mesh, operand.ndim, partials) for operand in tried[0].operands]
    parts = [
        [
            {layout: split(operand, layout) for layout in layouts}
            for operand, layouts in zip(t.operands, every, strict=True)
        ]
        for t in tried
    ]
    taken = 0
    for chosen in itertools.product(*every):
        shown = ", ".join(f"({layout})" for layout in chosen)
        given = [[split_[layout] for split_, layout in zip(by_layout, chosen, strict=True)] for by_layout in parts]
        outputs = functools.cache(
            functools.partial(_output_of, tried, chosen, given)
        )  # most answers fail in the first trial
        try:
            answer = rule(*chosen)
        except LayoutError as error:
            _check_remedy(rule, chosen, error)
            for layout, shapes in _outputs(mesh, tuple(shape), tuple(partials)).items():
                wrong = any(
                    _why_wrong(outputs(number), layout, shapes, t.whole, reshaped) for number, t in enumerate(tried)
                )
                assert wrong, f"{shown} was refused: {error}\nbut gives ({layout})"
            continue
        taken += 1
        shapes = {rank: part.shape for rank, part in split(tried[0].whole, answer).items()}
        for number, t in enumerate(tried):
            why = _why_wrong(outputs(number), answer, shapes, t.whole, reshaped)
            assert not why, f"{shown} gives ({answer}), which is wrong: {why}"
    return taken


def _output_of(
    tried: Sequence[Trial], layouts: Sequence[Layout], given: Sequence[Sequence[dict[int, Tensor]]], number: int
) -> dict[int, Tensor] | None:
    """The parts of a trial's output; None where the parts of a rank do not fit together."""
    local, parts = tried[number].local, given[number]
    try:
        return {rank: local(rank, layouts, *(part[rank] for part in parts)) for rank in parts[0]}
    except (RuntimeError, IndexError):
        return None


def _check_remedy(rule: Callable[..., Layout], layouts: Sequence[Layout], error: LayoutError) -> None:
    """The nearest layouts are taken, and the message names each reshard that leads to them."""
    assert len(error.nearest) == len(layouts), str(error)
    rule(*error.nearest)
    changed = [after for before, after in zip(layouts, error.nearest, strict=True) if before != after]
    remedy = str(error).rpartition("; reshard ")[2]
    assert changed
    assert [f"({after})" in remedy for after in changed] == [True] * len(changed), str(error)
    assert remedy.count(" to (") == len(changed), str(error)


def _layouts(mesh: ProcessMesh, ndim: int, partials: Sequence[Partial]) -> list[Layout]:
    """Those of one reduction at most, for two would have no meaning."""
    every = every_layout(mesh, ndim, partials)
    return [layout for layout in every if len({p for p in layout.placements if isinstance(p, Partial)}) < 2]


@functools.lru_cache(maxsize=64)
def _outputs(
    mesh: ProcessMesh, shape: tuple[int, ...], partials: tuple[Partial, ...]
) -> dict[Layout, dict[int, torch.Size]]:
    """Every layout that the output could have, with the shapes of its parts."""
    every = _layouts(mesh, len(shape), partials)
    return {layout: {rank: part.shape for rank, part in split(torch.zeros(shape), layout).items()} for layout in every}


@dataclass(frozen=True, eq=False)
class _Unequal:
    """What is printed only when it is asked for: a rule is right because thousands of other answers are wrong."""

    found: Tensor
    expected: Tensor

    def __str__(self) -> str:
        return f"{self.found} is not {self.expected}"


def _why_wrong(
    parts: dict[int, Tensor] | None, layout: Layout, shapes: dict[int, torch.Size], whole: Tensor, reshaped: bool
) -> str | _Unequal:
    """Why the parts are not those of `whole` in the layout; empty where they are."""
    if parts is None:
        return "the parts of some rank do not fit together"
    for rank, part in parts.items():
        if part.shape != shapes[rank] and not (reshaped and part.numel() == shapes[rank].numel()):
            return f"rank {rank} has {tuple(part.shape)}, not {tuple(shapes[rank])}"
    try:
        rebuilt = rebuild({rank: part.reshape(shapes[rank]) for rank, part in parts.items()}, layout, whole.shape)
    except AssertionError as error:
        return str(error)
    return "" if torch.equal(rebuilt, whole) else _Unequal(rebuilt, whole)
