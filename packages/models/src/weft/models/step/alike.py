"""Finds a model's alike blocks: in a run on shapes, few blocks run and stand for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ..parallel.plan import ParallelPlan

NUMBERS = ("layer",)  # attributes with a block's own number; not compared
LONGEST_PERIOD = 8  # most blocks in a repeated pattern; five with a window and a sixth with full attention, say


@dataclass(frozen=True, slots=True)
class Standing:
    """A block to run in place of several alike blocks."""

    number: int  # in the whole model
    blocks: tuple[int, ...]  # numbers of all blocks for which the block stands, `number` included


def standing_blocks(signatures: Sequence[Hashable], ahead: int = 1) -> list[Standing]:
    """Choose the blocks to run, in order. Each block of the model is in `blocks` of exactly one result.

    Looks for repeated patterns of up to `LONGEST_PERIOD` blocks. At both ends of a repetition each pattern runs;
    in the middle, a single pattern runs for all.
    signatures: of the model's blocks, equal for alike blocks.
    ahead: how far apart a block still changes another block's work, as by a gather ahead of time. At least this many
        blocks run at each end of a repetition.
    """
    found: list[Standing] = []
    start = 0
    while start < len(signatures):
        period, count = _longest_repetition(signatures[start:], ahead)
        side = -(-ahead // period)
        if count <= 2 * side + 1:
            found.append(Standing(start, (start,)))
            start += 1
            continue
        for repetition in (*range(side + 1), *range(count - side, count)):
            many = range(side, count - side) if repetition == side else (repetition,)
            found += [
                Standing(start + repetition * period + i, tuple(start + each * period + i for each in many))
                for i in range(period)
            ]
        start += period * count
    return found


def _longest_repetition(signatures: Sequence[Hashable], ahead: int) -> tuple[int, int]:
    """The pattern repeated from the first block on that saves the most blocks: (blocks in it, repetitions)."""
    best, most_saved = (1, 1), 0
    for period in range(1, min(LONGEST_PERIOD, len(signatures)) + 1):
        count = 1
        while signatures[count * period : (count + 1) * period] == signatures[:period]:
            count += 1
        saved = (count - 2 * -(-ahead // period) - 1) * period
        if saved > most_saved:
            best, most_saved = (period, count), saved
    return best


def block_names(model: nn.Module, plan: ParallelPlan) -> list[str]:
    """The names of the model's blocks: of the nn.ModuleList whose members match `plan.blocks`.

    [] where the modules matching are not the members of a single list: then the whole model runs.
    """
    names = [name for name, _ in model.named_modules() if any(fnmatchcase(name, each) for each in plan.blocks)]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    parents = {name.rpartition(".")[0] for name in outermost}
    if len(parents) != 1:
        return []
    (parent,) = parents
    members = model.get_submodule(parent)
    if not isinstance(members, nn.ModuleList) or len(members) != len(outermost):
        return []
    return outermost


def keep_standing_blocks(model: nn.Module, names: Sequence[str], ahead: int) -> list[Standing]:
    """Remove all blocks of the model for which another block stands. Returns the remaining blocks; [] for no names.

    names: from `block_names`. ahead: as for `standing_blocks`.
    """
    if not names:
        return []
    standing = standing_blocks([signature(model.get_submodule(name), name) for name in names], ahead)
    keep_blocks(model, names[0].rpartition(".")[0], [each.number for each in standing])
    return standing


def keep_blocks(model: nn.Module, name: str, numbers: Sequence[int]) -> None:
    """Replace the model's nn.ModuleList `name` by a list of the members at `numbers`."""
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    members = getattr(holder, own)
    setattr(holder, own, nn.ModuleList([members[number] for number in numbers]))


def signature(block: nn.Module, block_name: str) -> Hashable:
    """A value equal for blocks that compute alike: with the same modules, shapes of parameters, and settings."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, _setting(value, block_name))
                for key, value in sorted(vars(module).items())
                if not key.startswith("_") and key not in NUMBERS
            ),
            tuple(
                (key, tuple(each.shape), each.dtype, each.requires_grad)
                for key, each in module.named_parameters(recurse=False)
            ),
        )
        for name, module in block.named_modules()
    )


def _setting(value: Any, block_name: str) -> Hashable:
    """A module's attribute to compare: a tensor's shape and dtype, a number, a text without the block's name.

    Of any further value, the type alone.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, str):
        return value.replace(block_name, "")
    if isinstance(value, tuple):
        return tuple(_setting(each, block_name) for each in value)
    return value if value is None or isinstance(value, bool | int | float) else type(value).__qualname__
