"""cross_entropy as custom torch ops: one node in torch.compile's graph, with fake implementations for shapes.

cross_entropy's custom ops on DTensors: unwrap the operands and run the same ops on local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.distributed.tensor import DTensor

from ...dispatch.sharded.compiled import Placed, sum_over, to_local
from .. import function
from ..function import mean_denominator
from ..options import SCHEMA, Options, check
from .gather import Along, Classes, attempted, stand_in
from .layout_rule import CROSS_ENTROPY, local_denominator

__all__ = [
    "compiled",
    "divided_by",
    "place_of",
]  # `compiled` is imported from here, where its ops are registered for DTensors

# Loss, lse, z-loss, accuracy, denominator and statistics. Outputs not requested are empty. So is the denominator if
# the caller gave one.
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
TENSORS = "Tensor logits, Tensor target, Tensor? weight, Tensor? denominator"


class Place(NamedTuple):
    """A shard of the vocabulary, as arguments of a custom op.

    For DTensors the layouts define the shard, and `groups` only identifies the graph: see `groups_of`.
    """

    vocab_start: int = 0
    vocab_size: int | None = None
    groups: Sequence[str] | None = None  # names of the groups to gather over, minor first
    checked: bool = False  # whether to check, while gathering over the one group, that the ranks' classes fit together

    @property
    def shards(self) -> int:
        gather = Along.named(self.groups)
        return 1 if gather is None else math.prod(group.size() for group in gather.groups)


PLACE = "int vocab_start, int? vocab_size, str[]? groups, bool checked"  # the fields of `Place`


def compiled(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    *,
    options: Options,
    place: Place,
) -> tuple[Tensor, ...]:
    """The loss, the lse, and the other requested outputs.

    inplace_backward is ignored: the compiler decides on memory.
    """
    loss, lse, *constants, _, _ = forward(logits, target, weight, denominator, *place, *options.flat())
    asked = (options.return_z_loss, options.return_token_accuracy)
    return loss, lse, *(each.detach() for each, wanted in zip(constants, asked, strict=True) if wanted)


@library.custom_op(
    "weft::cross_entropy",
    mutates_args=(),
    schema=f"({TENSORS}, {PLACE}, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *asked: Any) -> Results:
    place, options = with_lse(asked)
    (loss, lse, *constants), saved = function.forward(
        logits, target, weight, denominator,
        options=options, vocab_start=place.vocab_start, vocab_size=place.vocab_size,
        gather=_gather(logits, target, weight, denominator, place, options),
    )  # fmt: skip
    own_denominator, statistics = saved[3:5]
    assert statistics is not None, "forward saves the statistics"
    if own_denominator is None or denominator is not None:
        own_denominator = statistics.new_empty(0)  # a custom op may not return an input
    remaining, empty = iter(constants), statistics.new_empty(0)
    z_loss = next(remaining) if options.return_z_loss else empty
    accuracy = next(remaining) if options.return_token_accuracy else empty.clone()
    return loss, lse, z_loss, accuracy, own_denominator, statistics.contiguous()  # a slice if the gather is `Checked`


def _gather(
    logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, place: Place, options: Options
) -> function.Gather | None:
    along = Along.named(place.groups)
    if along is None or place.vocab_size is None or not place.checked:
        return along
    start, vocab_size, V = place.vocab_start, place.vocab_size, logits.shape[-1] if logits.ndim else 0
    _, gather = attempted(
        lambda: check(logits, target, weight, denominator, options, start, vocab_size),
        along.groups[0],
        Classes(start, V, vocab_size),
        lambda: stand_in(target, logits, options.columns),
    )
    return gather


@forward.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *asked: Any) -> Results:
    place, options = with_lse(asked)
    lse = torch.empty(target.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    counts = options.reduction == "mean" and denominator is None
    reduced = target.shape if options.reduction == "none" else ()
    return (
        lse.new_empty(reduced),
        lse,
        lse.new_empty(reduced if options.return_z_loss else 0),
        lse.new_empty(reduced if options.return_token_accuracy else 0),
        lse.new_empty(((2,) if options.weighs_apart(weight) else ()) if counts else 0),
        lse.new_empty(place.shards, target.numel(), options.columns),
    )


@library.custom_op(
    "weft::cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor? grad, Tensor? grad_lse, {TENSORS}, Tensor statistics, {PLACE}, {SCHEMA}) -> Tensor",
)
def backward(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    statistics: Tensor,
    *asked: Any,
) -> Tensor:
    place, options = with_lse(asked)
    saved, needed = (logits, target, weight, denominator, statistics, None, None), (True, False, False, False)
    dlogits, *_ = function.backward(
        saved, (grad, grad_lse), needed,
        options=options, vocab_start=place.vocab_start, vocab_size=place.vocab_size,
    )  # fmt: skip
    assert dlogits is not None, "needed is true for the logits"
    return dlogits


@backward.register_fake
def _(grad: Tensor | None, grad_lse: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    logits, target, weight, denominator, *ctx.asked = inputs
    *_, own_denominator, statistics = output
    ctx.save_for_backward(
        logits, target, weight, own_denominator if own_denominator.numel() else denominator, statistics
    )
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    undefined = grad is None and grad_lse is None  # all upstream gradients are zero
    dlogits = None if undefined else backward(grad, grad_lse, *ctx.saved_tensors, *ctx.asked)
    return dlogits, *(None,) * (3 + len(ctx.asked))


forward.register_autograd(_gradients, setup_context=_save)


def with_lse(asked: Sequence[Any]) -> tuple[Place, Options]:
    """`place_and_options` for cross-entropy's own ops: they always return the lse, for a fixed number of outputs."""
    place, options = place_and_options(asked)
    return place, replace(options, return_lse=True)


def place_and_options(asked: Sequence[Any]) -> tuple[Place, Options]:
    """The place and the options from the last arguments of a custom op, in the order of PLACE and SCHEMA."""
    fields = len(Place._fields)
    return Place(*asked[:fields]), Options.of_flat(*asked[fields:])


def _forward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Results:
    logits, target, weight, denominator, *asked = args
    _, options = with_lse(asked)
    placed = Placed.of(CROSS_ENTROPY, (logits, target, weight, denominator), options=options)
    divisor = divided_by(denominator, placed.locals[1], placed.locals[2], logits.dtype, placed, options)
    rest = (*place_of(placed), *options.flat())
    loss, lse, z_loss, accuracy, counted, statistics = forward(*placed.locals[:3], divisor, *rest)
    outputs = (loss, lse, *([z_loss] * options.return_z_loss), *([accuracy] * options.return_token_accuracy))
    wrapped = iter(placed.wrapped(outputs))
    loss, lse = next(wrapped), next(wrapped)
    z_loss = next(wrapped) if options.return_z_loss else z_loss
    accuracy = next(wrapped) if options.return_token_accuracy else accuracy
    return loss, lse, z_loss, accuracy, counted if denominator is not None or divisor is None else divisor, statistics


def _backward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
    grad, grad_lse, logits, target, weight, denominator, statistics, *asked = args
    _, options = with_lse(asked)
    placed = Placed.of(CROSS_ENTROPY, (logits, target, weight, denominator), options=options)
    arrived, rest = map(to_local, (grad, grad_lse)), (*place_of(placed), *options.flat())
    dlogits = backward(*arrived, *placed.locals, statistics, *rest)
    return placed.as_operand(0, dlogits, placed.gradients(grad, grad_lse)[0])


def divided_by(
    denominator: Tensor | None,
    target: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    placed: Placed,
    options: Options,
) -> Tensor | None:
    """The denominator of "mean": the caller's, or the sum over all ranks. None if this rank has all tokens.

    target, weight: the local tensors.
    """
    if denominator is not None:
        return local_denominator(denominator) if isinstance(denominator, DTensor) else denominator
    count = placed.options["count"]
    if count is None:
        return None
    assert target is not None, "the target is required"
    wide = torch.promote_types(dtype, torch.float32)
    return mean_denominator(weight, target, options, wide, partial(sum_over, names=count.names))


def place_of(placed: Placed) -> Place:
    """The `Place` of this rank's shard, from the options of the op's rule."""
    gather = placed.options["gather"]
    return Place(
        placed.options["vocab_start"],
        placed.options["vocab_size"],
        None if gather is None else gather.names,
        checked=False,
    )


library.register_torch_dispatch(forward, DTensor, _forward)
library.register_torch_dispatch(backward, DTensor, _backward)
