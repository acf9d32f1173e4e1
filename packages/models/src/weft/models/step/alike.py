"""Finds a model's alike blocks, and copies few: in a run on shapes, few blocks run and stand for all."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..parallel.plan import ParallelPlan

NUMBERS = ("layer",)  # attributes with a block's own number; not compared
LONGEST_PERIOD = 8  # most blocks in a repeated pattern; five with a window and a sixth with full attention, say


@dataclass(frozen=True, slots=True)
class Representative:
    """A block which runs in place of several alike blocks."""

    number: int  # in the whole model
    blocks: tuple[int, ...]  # numbers of the alike blocks that the run of this block covers, `number` included


def choose_representatives(signatures: Sequence[Hashable], ahead: int = 1) -> list[Representative]:
    """Choose the blocks to run, in order. Each block of the model is in the `blocks` of exactly one representative.

    Looks for repeated patterns of up to `LONGEST_PERIOD` blocks. At both ends of a repetition each pattern runs;
    in the middle, a single pattern runs for all.
    signatures: of the model's blocks, equal for alike blocks.
    ahead: how far apart a block still changes another block's work, as by a gather ahead of time. At least this many
        blocks run at each end of a repetition.
    """
    found: list[Representative] = []
    start = 0
    while start < len(signatures):
        period, count = _longest_repetition(signatures[start:], ahead)
        side = -(-ahead // period)
        if count <= 2 * side + 1:
            found.append(Representative(start, (start,)))
            start += 1
            continue
        for repetition in (*range(side + 1), *range(count - side, count)):
            many = range(side, count - side) if repetition == side else (repetition,)
            found += [
                Representative(start + repetition * period + i, tuple(start + each * period + i for each in many))
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
    matching = set(names)
    outermost = [name for name in names if matching.isdisjoint(_ancestors(name))]
    parents = {name.rpartition(".")[0] for name in outermost}
    if len(parents) != 1:
        return []
    (parent,) = parents
    members = model.get_submodule(parent)
    if not isinstance(members, nn.ModuleList) or len(members) != len(outermost):
        return []
    return outermost


def _ancestors(name: str) -> Iterator[str]:
    """The names of the modules around a module, outermost first; without the model's own name, ""."""
    for index, character in enumerate(name):
        if character == ".":
            yield name[:index]


def representatives_of(model: nn.Module, names: Sequence[str], ahead: int) -> list[Representative]:
    """The blocks of the model to run in place of all; [] for no names.

    names: from `block_names`. ahead: as for `choose_representatives`.
    """
    return choose_representatives([signature(model.get_submodule(name), name) for name in names], ahead)


def copy_blocks(model: nn.Module, names: Sequence[str], numbers: Sequence[int]) -> nn.Module:
    """A copy of the model on the meta device, of whose blocks only those at `numbers` are left.

    names: from `block_names`; [] for a copy of the whole model.
    """
    return meta_copy(model, {names[0].rpartition(".")[0]: numbers} if names else None)


def meta_copy(model: nn.Module, blocks: Mapping[str, Sequence[int]] | None = None) -> nn.Module:
    """A copy of the model on the meta device; never copies data, and keeps tied parameters tied.

    blocks: for an nn.ModuleList by name, the numbers of the members to copy, in order; None: the whole model.
    """
    copies: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name} of {type(model).__name__} is a DTensor: the model is parallel already; record it "
                f"before parallelize, or a model of the same config built under torch.device('meta')"
            )
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for module in model.modules():
        tensors = (
            *module.buffers(recurse=False),
            *(each for each in vars(module).values() if isinstance(each, Tensor)),
        )
        copies |= {id(each): each.detach().to("meta") for each in tensors}
    for name, numbers in (blocks or {}).items():
        members = model.get_submodule(name)
        assert isinstance(members, nn.ModuleList), "blocks are the members of a list"
        copies[id(members)] = nn.ModuleList([copy.deepcopy(members[number], copies) for number in numbers])
    return copy.deepcopy(model, copies)


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
