"""Proof of a layout rule by brute force: its answers are right, and where it refuses, any answer would be wrong.

The operation runs on every rank's part. The oracle `shards` puts the parts together again.
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
    """An operation applied to a set of operands. A rule for many operations is proved by trials of several."""

    local: Callable[..., Tensor]  # (rank, layouts, *parts) -> the rank's part of the output
    whole: Tensor  # the output for the whole operands
    operands: Sequence[Tensor]


def trials(op: Callable[..., Tensor], *operands: Sequence[Tensor]) -> list[Trial]:
    """A trial for each set of operands, of an operation that does not depend on the rank."""
    return [Trial(lambda rank, layouts, *parts: op(*parts), op(*each), each) for each in operands]


def prove(
    rule: Callable[..., Layout],
    tried: Sequence[Trial],
    mesh: ProcessMesh,
    *,
    partials: Sequence[Partial] = PARTIALS,
    reshaped: bool = False,
) -> int:
    """Prove a layout rule. Returns the number of combinations of layouts that the rule takes.

    rule: from the operands' layouts to the output's. An answer must be right in every trial. Where the rule refuses,
        every possible answer, including Partial by each of `partials`, must be wrong in some trial.
    reshaped: count a part as having the shape that a layout asks for, if it has as many elements.
    Raises AssertionError for a combination that the rule takes or refuses wrongly.
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
    accepted = 0
    for chosen in itertools.product(*every):
        shown = ", ".join(f"({layout})" for layout in chosen)
        given = [[split_[layout] for split_, layout in zip(by_layout, chosen, strict=True)] for by_layout in parts]
        # Computed on demand, because most answers fail in the first trial.
        outputs = functools.cache(functools.partial(_output_of, tried, chosen, given))
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
        accepted += 1
        shapes = {rank: part.shape for rank, part in split(tried[0].whole, answer).items()}
        for number, t in enumerate(tried):
            why = _why_wrong(outputs(number), answer, shapes, t.whole, reshaped)
            assert not why, f"{shown} gives ({answer}), which is wrong: {why}"
    return accepted


def _output_of(
    tried: Sequence[Trial], layouts: Sequence[Layout], given: Sequence[Sequence[dict[int, Tensor]]], number: int
) -> dict[int, Tensor] | None:
    """Every rank's part of a trial's output; None where the parts of a rank do not fit together."""
    local, parts = tried[number].local, given[number]
    try:
        return {rank: local(rank, layouts, *(part[rank] for part in parts)) for rank in parts[0]}
    except (RuntimeError, IndexError):
        return None


def _check_remedy(rule: Callable[..., Layout], layouts: Sequence[Layout], error: LayoutError) -> None:
    """The rule takes the error's nearest layouts, and the message names each reshard to them."""
    assert len(error.nearest) == len(layouts), str(error)
    rule(*error.nearest)
    changed = [after for before, after in zip(layouts, error.nearest, strict=True) if before != after]
    remedy = str(error).rpartition("; reshard ")[2]
    assert changed
    assert [f"({after})" in remedy for after in changed] == [True] * len(changed), str(error)
    assert remedy.count(" to (") == len(changed), str(error)


def _layouts(mesh: ProcessMesh, ndim: int, partials: Sequence[Partial]) -> list[Layout]:
    """All layouts with at most one reduction; with two, the value would depend on their order."""
    every = every_layout(mesh, ndim, partials)
    return [layout for layout in every if len({p for p in layout.placements if isinstance(p, Partial)}) < 2]


@functools.lru_cache(maxsize=64)
def _outputs(
    mesh: ProcessMesh, shape: tuple[int, ...], partials: tuple[Partial, ...]
) -> dict[Layout, dict[int, torch.Size]]:
    """Every possible layout of the output, with the shapes of its parts."""
    every = _layouts(mesh, len(shape), partials)
    return {layout: {rank: part.shape for rank, part in split(torch.zeros(shape), layout).items()} for layout in every}


@dataclass(frozen=True, eq=False)
class _Unequal:
    """Two unequal tensors, formatted only when printed: a proof finds thousands of wrong answers."""

    found: Tensor
    expected: Tensor

    def __str__(self) -> str:
        return f"{self.found} is not {self.expected}"


def _why_wrong(
    parts: dict[int, Tensor] | None, layout: Layout, shapes: dict[int, torch.Size], whole: Tensor, reshaped: bool
) -> str | _Unequal:
    """Why the parts are not the parts of `whole` in the layout; empty where they are."""
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
