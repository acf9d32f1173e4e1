"""Finds a model's alike blocks, and runs few for all, in a run on shapes.

`copy_blocks` copies few blocks, which stand for all. `follow_few` finds from few blocks what `follow` finds from all,
for the cut of a model into stages. `message_forms` gives, from few blocks, the forms of the messages between stages,
which real stages publish in the world's store.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.reshard import exact_sums
from weft.reshard.extension import differentiable

from ..losses import first_gradient
from ..parallel import parallelize
from ..parallel.pipeline.cut import END, Flow, follow
from ..parallel.pipeline.messages import form_of
from ..parallel.pipeline.run import Pipeline
from ..parallel.pipeline.step import Microbatch, run_backward
from ..parallel.plan import ParallelPlan, exact_of, without_pipeline
from ..parallel.resolve import module_plans_of
from .criterion import Criterion

NUMBERS = ("layer",)  # attributes with a block's own number; not compared
LONGEST_PERIOD = 8  # most blocks in a repeated pattern; five with a window and a sixth with full attention, say


@dataclass(frozen=True, slots=True)
class Representative:
    """A block which runs on shapes in place of several alike blocks. Made by `choose_representatives`."""

    number: int  # in the whole model
    blocks: tuple[int, ...]  # numbers of the alike blocks that the run of this block covers, `number` included


def choose_representatives(
    signatures: Sequence[Hashable], ahead: int = 1, behind: int | None = None
) -> list[Representative]:
    """Choose the blocks to run, in order. Each block of the model is in the `blocks` of exactly one representative.

    Looks for repeated patterns of up to `LONGEST_PERIOD` blocks. At both ends of a repetition each pattern runs;
    in the middle, a single pattern runs for all.
    Called by `representatives_of` and `message_forms`; and by `PlanMemory`, to learn whether a model has alike blocks.
    signatures: of the model's blocks, in order, equal for alike blocks.
    ahead: the least number of blocks to run at the beginning of a repetition: the greatest distance, in blocks, at
        which a block's work depends on another block. 2 where parameters of the next two blocks are gathered early.
    behind: the least number of blocks to run at the end of a repetition; None: as `ahead`.
    """
    found: list[Representative] = []
    start = 0
    while start < len(signatures):
        period, count = _longest_repetition(signatures[start:], ahead)
        first, last = -(-ahead // period), -(-(ahead if behind is None else behind) // period)
        if count <= first + last + 1:
            found.append(Representative(start, (start,)))
            start += 1
            continue
        for repetition in (*range(first + 1), *range(count - last, count)):
            many = range(first, count - last) if repetition == first else (repetition,)
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
    """The names of the model's blocks, in order: of the nn.ModuleList whose members match `plan.blocks`.

    Called to predict times and memory: for the blocks to copy, and for the number of blocks.
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


def representatives_of(
    model: nn.Module, names: Sequence[str], ahead: int, behind: int | None = None
) -> list[Representative]:
    """The blocks of the model to run in place of all; [] for no names.

    Called by `reduce_model` for the times of a step, by `memory_parts` and `saved_parts` for the memory, and by
    `follow_few` for the cut into stages.
    names: from `block_names`, or of the layers of a pipeline. ahead, behind: as for `choose_representatives`.
    """
    return choose_representatives([signature(model.get_submodule(name), name) for name in names], ahead, behind)


def copy_blocks(model: nn.Module, names: Sequence[str], numbers: Sequence[int]) -> nn.Module:
    """A copy of the model on the meta device with the blocks at `numbers` alone. Called before a run on few blocks.

    names: of all blocks, from `block_names`; [] for a copy of the whole model. numbers: in order, from 0.
    Raises ValueError as `meta_copy`.
    """
    return meta_copy(model, {names[0].rpartition(".")[0]: numbers} if names else None)


def meta_copy(model: nn.Module, blocks: Mapping[str, Sequence[int]] | None = None) -> nn.Module:
    """A copy of the model on the meta device; never copies data, and keeps tied parameters tied.

    Called by `on_shapes` before `parallelize`, and by `copy_blocks`.
    blocks: for an nn.ModuleList by name, the numbers of the members to copy, in order; None: the whole model.
    Raises ValueError for a model with a DTensor parameter: the model is parallel already.
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
    """A value equal for blocks computing alike: with the same modules, shapes of parameters, and settings.

    For `choose_representatives`. block_name: in the model; left out of texts, in which alike blocks may differ.
    """
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


def follow_few(model: nn.Module, layers: Sequence[str]) -> Flow:
    """The `Flow` that `follow` finds in a model of Weft's own, from a forward of few of the alike layers.

    Given to `cut` by `on_shapes`, in place of `follow`. A layer reads what the layers alike read.
    layers: the names of the listed layers. Errors: as for `follow`.
    """
    representatives = representatives_of(model, layers, 1)
    few = follow(copy_blocks(model, layers, [each.number for each in representatives]), layers[: len(representatives)])

    def all_readers(readers: set[int]) -> set[int]:
        return {number for each in readers for number in ((END,) if each == END else representatives[each].blocks)}

    return Flow(
        tuple(layers),
        {name: all_readers(readers) for name, readers in few.outer_modules.items()},
        {name: all_readers(readers) for name, readers in few.parameters.items()},
    )


# {("F" for activations or "B" for gradients, the stage that receives): {`Microbatch.kind`: result of `form_of`}}
MessageForms = dict[tuple[str, int], dict[Any, Any]]


def message_forms(
    model: nn.Module,
    pipeline: Pipeline,
    plan: ParallelPlan,
    microbatch: Microbatch,
    criterion: Criterion,
    *,
    few_blocks: bool,
) -> MessageForms:
    """Find the forms of all messages, by running all stages at this rank's place in the stage mesh.

    Called by `on_shapes`, for a rank whose coordinates in the stage mesh are not in `SharedRuns.forms` yet.
    model: the whole model, not parallel. pipeline: of the rank's parallel model. microbatch, criterion: of the run.
    few_blocks: run only few of the alike blocks. Where their outputs, or gradients of outputs, differ in form, all
        blocks run after all.
    """
    layers, ranges = pipeline.stages.cut.layers, pipeline.stages.cut.ranges
    boundaries = [start - 1 for start, _ in ranges[1:]]  # numbers of the layers whose outputs are messages
    plan = without_pipeline(plan)
    everything = [Representative(number, (number,)) for number in range(len(layers))]
    representatives, kinds = everything, list(range(len(layers)))
    if few_blocks:
        styles = _styles_of(model, plan)
        signatures = [(signature(model.get_submodule(name), name), _of_block(styles, name)) for name in layers]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(signatures))}
        kinds = [numbers[each] for each in signatures]
        representatives = choose_representatives(kinds)
    copied = copy_blocks(model, layers if few_blocks else [], [each.number for each in representatives])
    outputs, gradients = _run(copied, pipeline, plan, microbatch, criterion, len(representatives), layers[0])
    of_kind: dict[int, tuple[Any, Any]] = {}
    for i, each in enumerate(representatives[:-1]):  # the model reads the last block's output
        form = outputs[i], gradients[i]
        if of_kind.setdefault(kinds[each.number], form) != form and representatives is not everything:
            return message_forms(model, pipeline, plan, microbatch, criterion, few_blocks=False)
    place = {number: i for i, each in enumerate(representatives) for number in each.blocks}
    forms: MessageForms = {}
    for stage, layer in enumerate(boundaries, 1):
        forms["F", stage] = {microbatch.kind: outputs[place[layer]]}
        forms["B", stage - 1] = {microbatch.kind: gradients[place[layer]]}
    return forms


def _run(
    model: nn.Module,
    pipeline: Pipeline,
    plan: ParallelPlan,
    microbatch: Microbatch,
    criterion: Criterion,
    count: int,
    first: str,
) -> tuple[list[Any], list[Any]]:
    """Run the model; return the forms of the blocks' outputs, and of these outputs' gradients.

    count: blocks in the model. first: the first block's name.
    """
    parallelize(model, pipeline.stage_mesh, plan)
    outputs: list[Any] = [None] * count
    gradients: list[list[Tensor | None]] = [[] for _ in range(count)]

    def note(number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[number] = form_of(output)
            followed = differentiable(output)
            gradients[number] = [None] * len(followed)
            for i, each in enumerate(followed):
                each.register_hook(partial(gradients[number].__setitem__, i))  # type: ignore[no-untyped-call]

        return hook

    for number in range(count):
        name = f"{first.rpartition('.')[0]}.{number}"
        model.get_submodule(name).register_forward_hook(note(number))
    with exact_sums(exact_of(plan)):
        loss = differentiable(criterion(model(*microbatch.args, **microbatch.kwargs), microbatch.targets))
        run_backward(loss, [first_gradient(each) for each in loss])
    return outputs, [form_of(each) for each in gradients]


def _styles_of(model: nn.Module, plan: ParallelPlan) -> list[tuple[str, str]]:
    """(module's name, text of a style, prepared input or output) for all that the plan gives to modules."""
    return [
        (name, repr(style))
        for each in module_plans_of(model, plan)
        for styles in (each.styles, each.inputs, each.outputs)
        for name, style in styles.items()
    ]


def _of_block(styles: Sequence[tuple[str, str]], block: str) -> tuple[tuple[str, str], ...]:
    """The items of `_styles_of` in a block, with names relative to the block."""
    prefix = f"{block}."
    return tuple((name[len(block) :], text) for name, text in styles if f"{name}.".startswith(prefix))
