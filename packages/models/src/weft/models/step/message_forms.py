"""The forms of the messages between stages on shapes, which real stages publish in the world's store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from weft.reshard import exact_sums
from weft.reshard.extension import differentiable

from ..losses import first_gradient
from ..parallel import ParallelPlan, parallelize
from ..parallel.pipeline.messages import form_of
from ..parallel.pipeline.run import Pipeline
from ..parallel.pipeline.step import Microbatch, run_backward
from ..parallel.plan import exact_of, without_pipeline
from ..parallel.resolve import module_plans_of
from .alike import Representative, choose_representatives, copy_blocks, signature
from .criterion import Criterion

MessageForms = dict[tuple[str, int], dict[Any, Any]]  # by ("F" or "B", receiving stage), then by the microbatch's kind


def message_forms(
    model: nn.Module,
    pipeline: Pipeline,
    plan: ParallelPlan,
    microbatch: Microbatch,
    criterion: Criterion,
    *,
    few_blocks: bool,
) -> MessageForms:
    """Find the forms of all messages, by running all stages at this rank's place in the stage mesh. Called by `record`.

    model: not parallel. microbatch, criterion: of the run.
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
