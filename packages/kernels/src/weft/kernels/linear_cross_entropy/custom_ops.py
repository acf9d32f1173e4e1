"""linear_cross_entropy as custom ops of torch: one node of torch.compile's graph, with a fake implementation for its shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from ..cross_entropy.custom_ops import PLACE, Place, place_and_options
from ..cross_entropy.options import SCHEMA, Options
from ..cross_entropy.sharded.gather import Along
from . import function
from .agreement import classes_of
from .checks import checked_sizes
from .function import in_forward
from .gradients import Wanted
from .sharded.settle import settled_by

TENSORS = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? denominator"


def compiled(
    *tensors: Tensor | None,
    options: Options,
    wanted: Wanted,
    chunk_tokens: int | None,
    place: Place,
    settled: Tensor | None,
) -> tuple[Tensor, ...]:
    """(loss,) or (loss, lse) of the tensors of TENSORS. A second backward may follow whatever was asked: the compiler decides
    on memory.

    The gradients have the inputs' dtype: in torch 2.13 the compiler does not know of another.
    settled: what `settle` gave, where it was asked.
    """
    flags = [each is not None for each in wanted]
    made = forward(*tensors, settled, flags, chunk_tokens, *place, *options.flat())
    return tuple(made[: 1 + options.return_lse])


@library.custom_op(
    "weft::linear_cross_entropy_settle",
    mutates_args=(),
    schema=f"({TENSORS}, int? chunk_tokens, bool sequence_parallel, {PLACE}, {SCHEMA}) -> Tensor",
)
def settle(*given: Any) -> Tensor:
    """What `settled_by` gives, for the one group of the place."""
    *tensors, chunk_tokens, sequence_parallel = given[:8]
    place, options = place_and_options(given[8:])
    along, vocab_size = Along.named(place.groups), place.vocab_size
    assert along is not None and vocab_size is not None, "only the form for groups asks for it"
    (group,), held = along.groups, classes_of(tensors[1], place.vocab_start, vocab_size)
    wanted = (None,) * 3  # compiled, gradients have the inputs' dtype: chunks are cut as where none is wanted
    _, settled = settled_by(
        lambda: (
            None,
            checked_sizes(
                *tensors, options=options, held=held, wanted=wanted, chunk_tokens=chunk_tokens, rank=group.rank(),
                ranks=group.size(), sequence_parallel=sequence_parallel,
            ),
        ),
        group,
        held,
        tensors[0].device,
    )  # fmt: skip
    return settled


@settle.register_fake
def _(input: Tensor, *given: Any) -> Tensor:
    return input.new_empty((), dtype=torch.float32)


@library.custom_op(
    "weft::linear_cross_entropy",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor? settled, bool[] wanted, int? chunk_tokens, {PLACE}, {SCHEMA}) -> Tensor[]",
)
def forward(*given: Any) -> list[Tensor]:
    """The outputs, then what backward needs and is no input: the gradients made in forward, or denominator and statistics."""
    *tensors, settled, wanted, chunk_tokens = given[:9]
    place, options = place_and_options(given[9:])
    (loss, *lse), saved = function.forward(
        *tensors, options=options, wanted=_wanted(tensors[0], wanted), chunk_tokens=chunk_tokens, **_shard(place)
    )
    if settled is not None:
        loss = loss + settled
    if _in_forward(options, tensors[0], wanted):
        # Of the inputs' dtype, however many chunks there were: that a trace need not know.
        made = [None if each is None else each.to(tensors[0].dtype) for each in saved[1:]]
    else:
        made = [saved[5] if tensors[5] is None else None, saved[6]]
    return [loss, *lse, *(loss.new_empty(0) if each is None else each for each in made)]


@forward.register_fake
def _(*given: Any) -> list[Tensor]:
    input, linear_weight, target, linear_bias, _, denominator, _, wanted, _ = given[:9]
    place, options = place_and_options(given[9:])
    lse = torch.empty(target.shape, dtype=torch.promote_types(input.dtype, torch.float32), device=input.device)
    nothing = lse.new_empty(0)
    loss = torch.empty_like(lse) if options.reduction == "none" else lse.new_empty(())
    outputs = [loss, lse] if options.return_lse else [loss]
    if _in_forward(options, input, wanted):
        factors = zip((input, linear_weight, linear_bias), wanted, strict=True)
        return [*outputs, *(x.new_empty(x.shape) if want and x is not None else nothing.clone() for x, want in factors)]
    counted = lse.new_empty(()) if options.reduction == "mean" and denominator is None else nothing
    columns = 4 if options.label_smoothing else 3
    return [*outputs, counted, lse.new_empty(place.shards, target.numel(), columns)]


@library.custom_op(
    "weft::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor?[] grads, Tensor?[] tensors, bool[] needed, int? chunk_tokens, {PLACE}, {SCHEMA}) -> Tensor[]",
)
def backward(
    grads: list[Tensor | None],
    tensors: list[Tensor | None],
    needed: list[bool],
    chunk_tokens: int | None,
    *asked: Any,
) -> list[Tensor]:
    """The gradients of input, linear_weight and linear_bias, those that are needed."""
    place, options = place_and_options(asked)
    of_each = (needed[0], needed[1], False, needed[2], False, False)
    assert tensors[0] is not None, "forward saves the input, or an empty tensor of its dtype"
    wanted = _wanted(tensors[0], needed)
    found = function.backward(
        tensors, grads, of_each, options=options, wanted=wanted, chunk_tokens=chunk_tokens, **_shard(place)
    )
    return [each for each in found if each is not None]


@backward.register_fake
def _(grads: list[Tensor | None], tensors: list[Tensor | None], needed: list[bool], *asked: Any) -> list[Tensor]:
    factors = tensors[1:] if len(tensors) == 4 else (tensors[0], tensors[1], tensors[3])
    return [x.new_empty(x.shape) for x, need in zip(factors, needed, strict=True) if need and x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, _, wanted, ctx.chunk_tokens = inputs[:9]
    ctx.asked = inputs[9:]
    _, options = place_and_options(ctx.asked)
    ctx.outputs = 1 + options.return_lse
    made = output[ctx.outputs :]
    if _in_forward(options, tensors[0], wanted):
        ctx.save_for_backward(tensors[0].new_empty(0), *made)
    else:
        counted, statistics = made
        tensors[5] = counted if tensors[5] is None and counted.ndim == 0 else tensors[5]
        ctx.save_for_backward(*tensors, statistics)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    arrived = grads[: ctx.outputs]
    if all(grad is None for grad in arrived):  # autograd's zeros
        return (None,) * (9 + len(ctx.asked))
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    found = iter(backward(arrived, list(ctx.saved_tensors), needed, ctx.chunk_tokens, *ctx.asked))
    dinput, dweight, dbias = (next(found) if need else None for need in needed)
    return dinput, dweight, None, dbias, *(None,) * (5 + len(ctx.asked))


forward.register_autograd(_gradients, setup_context=_keep)


def _shard(place: Place) -> dict[str, Any]:
    gather = Along.named(place.groups)
    return {
        "vocab_start": place.vocab_start,
        "vocab_size": place.vocab_size,
        "shards": place.shards,
        "gather": gather,
    }


def _in_forward(options: Options, input: Tensor, wanted: list[bool]) -> bool:
    return in_forward(options, input.dtype, _wanted(input, wanted))


def _wanted(input: Tensor, flags: list[bool]) -> Wanted:
    return tuple(input.dtype if flag else None for flag in flags)
