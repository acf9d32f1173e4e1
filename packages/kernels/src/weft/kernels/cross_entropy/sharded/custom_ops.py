"""cross_entropy as custom torch ops: one node in torch.compile's graph, with fake implementations for shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from .. import function
from ..options import SCHEMA, Options, check, form_of
from .agreement import Classes, stand_in
from .gather import Along, attempted

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
        lambda: check(form_of(logits), target, weight, denominator, options, start, vocab_size),
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
