"""cross_entropy as custom torch ops: one node in torch.compile's graph, with fake implementations for shapes.

On DTensors the custom ops unwrap the operands and run on the local tensors.
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

from ...dispatch.sharded.compiled import TracedOperands, sum_over, to_local
from .. import function
from ..function import mean_denominator
from ..options import SCHEMA, Options, check
from .gather import ShardClasses, VocabGather, placeholder_statistics, run_or_report
from .layout_rule import CROSS_ENTROPY, local_denominator

__all__ = ["apply_custom_op", "compute_denominator", "shard_of"]  # importing them registers the ops for DTensors

# Loss, lse, z-loss, accuracy, denominator and statistics. Outputs not requested are empty, and the denominator is empty
# if given by the caller.
LossResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
TENSORS = "Tensor logits, Tensor target, Tensor? weight, Tensor? denominator"


class VocabShard(NamedTuple):
    """A shard of the vocabulary, as arguments of a custom op.

    For DTensors the layouts define the shard, and `groups` only identifies the graph: see `groups_of`.
    """

    vocab_start: int = 0
    vocab_size: int | None = None
    groups: Sequence[str] | None = None  # names of the groups to gather over, minor first
    checked: bool = False  # gathering also checks that the shards make up the vocabulary; needs a single group

    @property
    def shards(self) -> int:
        """The number of shards: the product of the sizes of `groups`, 1 without groups."""
        gather = VocabGather.from_names(self.groups)
        return 1 if gather is None else math.prod(group.size() for group in gather.groups)


SHARD_SCHEMA = "int vocab_start, int? vocab_size, str[]? groups, bool checked"  # the fields of `VocabShard`


def apply_custom_op(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    *,
    options: Options,
    shard: VocabShard,
) -> tuple[Tensor, ...]:
    """The loss, the lse, and the other requested outputs.

    inplace_backward is ignored: the compiler decides on memory.
    """
    loss, lse, *constants, _, _ = forward(logits, target, weight, denominator, *shard, *options.flat())
    requested = (options.return_z_loss, options.return_token_accuracy)
    return loss, lse, *(each.detach() for each, wanted in zip(constants, requested, strict=True) if wanted)


@library.custom_op(
    "weft::cross_entropy",
    mutates_args=(),
    schema=f"({TENSORS}, {SHARD_SCHEMA}, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *flat: Any
) -> LossResults:
    shard, options = _parse_with_lse(flat)
    (loss, lse, *constants), saved = function.forward(
        logits, target, weight, denominator,
        options=options, vocab_start=shard.vocab_start, vocab_size=shard.vocab_size,
        gather=_gather(logits, target, weight, denominator, shard, options),
    )  # fmt: skip
    own_denominator, statistics = saved[3:5]
    assert statistics is not None, "forward saves the statistics"
    if own_denominator is None or denominator is not None:
        own_denominator = statistics.new_empty(0)  # a custom op may not return an input
    remaining, empty = iter(constants), statistics.new_empty(0)
    z_loss = next(remaining) if options.return_z_loss else empty
    accuracy = next(remaining) if options.return_token_accuracy else empty.clone()
    return loss, lse, z_loss, accuracy, own_denominator, statistics.contiguous()  # a slice after a `CheckedGather`


def _gather(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    shard: VocabShard,
    options: Options,
) -> function.StartGather | None:
    gather = VocabGather.from_names(shard.groups)
    if gather is None or shard.vocab_size is None or not shard.checked:
        return gather
    start, vocab_size, V = shard.vocab_start, shard.vocab_size, logits.shape[-1] if logits.ndim else 0
    _, checked_gather = run_or_report(
        lambda: check(logits, target, weight, denominator, options, start, vocab_size),
        gather.groups[0],
        ShardClasses(start, V, vocab_size),
        lambda: placeholder_statistics(target, logits, options.columns),
    )
    return checked_gather


@forward.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, denominator: Tensor | None, *flat: Any) -> LossResults:
    shard, options = _parse_with_lse(flat)
    lse = torch.empty(target.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    has_own_denominator = options.reduction == "mean" and denominator is None
    reduced = target.shape if options.reduction == "none" else ()
    return (
        lse.new_empty(reduced),
        lse,
        lse.new_empty(reduced if options.return_z_loss else 0),
        lse.new_empty(reduced if options.return_token_accuracy else 0),
        lse.new_empty(((2,) if options.has_two_weights(weight) else ()) if has_own_denominator else 0),
        lse.new_empty(shard.shards, target.numel(), options.columns),
    )


@library.custom_op(
    "weft::cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor? grad, Tensor? grad_lse, {TENSORS}, Tensor statistics, {SHARD_SCHEMA}, {SCHEMA}) -> Tensor",
)
def backward(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    statistics: Tensor,
    *flat: Any,
) -> Tensor:
    shard, options = _parse_with_lse(flat)
    saved, needed = (logits, target, weight, denominator, statistics, None, None), (True, False, False, False)
    dlogits, *_ = function.backward(
        saved, (grad, grad_lse), needed,
        options=options, vocab_start=shard.vocab_start, vocab_size=shard.vocab_size,
    )  # fmt: skip
    assert dlogits is not None, "needed is true for the logits"
    return dlogits


@backward.register_fake
def _(grad: Tensor | None, grad_lse: Tensor | None, logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: LossResults) -> None:
    logits, target, weight, denominator, *ctx.flat = inputs
    *_, own_denominator, statistics = output
    ctx.save_for_backward(
        logits, target, weight, own_denominator if own_denominator.numel() else denominator, statistics
    )
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *constant_grads: Any
) -> tuple[Tensor | None, ...]:
    undefined = grad is None and grad_lse is None  # all upstream gradients are zero
    dlogits = None if undefined else backward(grad, grad_lse, *ctx.saved_tensors, *ctx.flat)
    return dlogits, *(None,) * (3 + len(ctx.flat))


forward.register_autograd(_gradients, setup_context=_save)


def _parse_with_lse(flat: Sequence[Any]) -> tuple[VocabShard, Options]:
    """`parse_shard_and_options` for the ops of cross-entropy, which always return the lse to have a fixed number of
    outputs.
    """
    shard, options = parse_shard_and_options(flat)
    return shard, replace(options, return_lse=True)


def parse_shard_and_options(flat: Sequence[Any]) -> tuple[VocabShard, Options]:
    """The shard and the options from `flat`, a custom op's last arguments, in the order of SHARD_SCHEMA and SCHEMA."""
    fields = len(VocabShard._fields)
    return VocabShard(*flat[:fields]), Options.of_flat(*flat[fields:])


def _forward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> LossResults:
    logits, target, weight, denominator, *flat = args
    _, options = _parse_with_lse(flat)
    operands = TracedOperands.unwrap(CROSS_ENTROPY, (logits, target, weight, denominator), options=options)
    divisor = compute_denominator(denominator, operands.locals[1], operands.locals[2], logits.dtype, operands, options)
    flat = [*shard_of(operands), *options.flat()]
    loss, lse, z_loss, accuracy, own_denominator, statistics = forward(*operands.locals[:3], divisor, *flat)
    outputs = (loss, lse, *([z_loss] * options.return_z_loss), *([accuracy] * options.return_token_accuracy))
    wrapped = iter(operands.wrap_outputs(outputs))
    loss, lse = next(wrapped), next(wrapped)
    z_loss = next(wrapped) if options.return_z_loss else z_loss
    accuracy = next(wrapped) if options.return_token_accuracy else accuracy
    if denominator is None and divisor is not None:
        own_denominator = divisor
    return loss, lse, z_loss, accuracy, own_denominator, statistics


def _backward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
    grad, grad_lse, logits, target, weight, denominator, statistics, *flat = args
    _, options = _parse_with_lse(flat)
    operands = TracedOperands.unwrap(CROSS_ENTROPY, (logits, target, weight, denominator), options=options)
    local_grads, flat = map(to_local, (grad, grad_lse)), [*shard_of(operands), *options.flat()]
    dlogits = backward(*local_grads, *operands.locals, statistics, *flat)
    return operands.wrap_gradient(0, dlogits, operands.gradient_layouts(grad, grad_lse)[0])


def compute_denominator(
    denominator: Tensor | None,
    target: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    operands: TracedOperands,
    options: Options,
) -> Tensor | None:
    """The denominator of "mean": the caller's, or the sum over all ranks. None if the op needs no sum over ranks.

    target, weight: the local tensors.
    """
    if denominator is not None:
        return local_denominator(denominator) if isinstance(denominator, DTensor) else denominator
    all_reduce = operands.local_options["all_reduce"]
    if all_reduce is None:
        return None
    assert target is not None, "the target is required"
    wide = torch.promote_types(dtype, torch.float32)
    return mean_denominator(weight, target, options, wide, partial(sum_over, names=all_reduce.names))


def shard_of(operands: TracedOperands) -> VocabShard:
    """The `VocabShard` of this rank's shard, from the options of the op's rule."""
    gather = operands.local_options["gather"]
    return VocabShard(
        operands.local_options["vocab_start"],
        operands.local_options["vocab_size"],
        None if gather is None else gather.names,
        checked=False,
    )


library.register_torch_dispatch(forward, DTensor, _forward)
library.register_torch_dispatch(backward, DTensor, _backward)
