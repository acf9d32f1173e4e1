"""linear_cross_entropy as custom ops of torch, with shapes for what is traced: what torch.compile puts in its graph, whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from ..cross_entropy.options import SCHEMA, Options
from . import function
from .function import in_forward
from .gradients import Wanted


def compiled(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    denominator: Tensor | None,
    *,
    options: Options,
    wanted: Wanted,
    chunk_tokens: int | None,
) -> tuple[Tensor, ...]:
    """(loss,) or (loss, lse). A second backward may follow whatever was asked: the compiler decides on memory.

    The gradients have the inputs' dtype: in torch 2.13 the compiler does not know of another.
    """
    flags = [each is not None for each in wanted]
    made = forward(input, linear_weight, target, linear_bias, weight, denominator, flags, chunk_tokens, *options.flat())
    return tuple(made[: 1 + options.return_lse])


@library.custom_op(
    "weft::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? denominator, "
    f"bool[] wanted, int? chunk_tokens, {SCHEMA}) -> Tensor[]",
)
def forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    denominator: Tensor | None,
    wanted: list[bool],
    chunk_tokens: int | None,
    *asked: Any,
) -> list[Tensor]:
    """The outputs, then what backward needs and is no input: the gradients made in forward, or denominator and statistics."""
    options = Options.of_flat(*asked)
    outputs, saved = function.forward(
        input, linear_weight, target, linear_bias, weight, denominator,
        options=options, wanted=_wanted(input, wanted), chunk_tokens=chunk_tokens,
    )  # fmt: skip
    if _in_forward(options, input, wanted):
        # Of the inputs' dtype, however many chunks there were: that a trace need not know.
        made = [None if each is None else each.to(input.dtype) for each in saved[1:]]
    else:
        made = [saved[5] if denominator is None else None, saved[6]]
    return [*outputs, *(outputs[0].new_empty(0) if each is None else each for each in made)]


@forward.register_fake
def _(*given: Any) -> list[Tensor]:
    input, linear_weight, target, linear_bias, _, denominator, wanted, _, *asked = given
    options = Options.of_flat(*asked)
    lse = torch.empty(target.shape, dtype=torch.promote_types(input.dtype, torch.float32), device=input.device)
    nothing = lse.new_empty(0)
    outputs = [torch.empty_like(lse) if options.reduction == "none" else lse.new_empty(()), lse][
        : 1 + options.return_lse
    ]
    if _in_forward(options, input, wanted):
        factors = zip((input, linear_weight, linear_bias), wanted, strict=True)
        return [*outputs, *(x.new_empty(x.shape) if want and x is not None else nothing.clone() for x, want in factors)]
    counted = lse.new_empty(()) if options.reduction == "mean" and denominator is None else nothing
    columns = 4 if options.label_smoothing else 3
    return [*outputs, counted, lse.new_empty(1, target.numel(), columns)]


@library.custom_op(
    "weft::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor?[] grads, Tensor?[] tensors, bool[] needed, int? chunk_tokens, {SCHEMA}) -> Tensor[]",
)
def backward(
    grads: list[Tensor | None],
    tensors: list[Tensor | None],
    needed: list[bool],
    chunk_tokens: int | None,
    *asked: Any,
) -> list[Tensor]:
    """The gradients of input, linear_weight and linear_bias, those that are needed."""
    of_each = (needed[0], needed[1], False, needed[2], False, False)
    assert tensors[0] is not None, "forward saves the input, or an empty tensor of its dtype"
    wanted = _wanted(tensors[0], needed)
    found = function.backward(
        tensors, grads, of_each, options=Options.of_flat(*asked), wanted=wanted, chunk_tokens=chunk_tokens
    )
    return [each for each in found if each is not None]


@backward.register_fake
def _(grads: list[Tensor | None], tensors: list[Tensor | None], needed: list[bool], *asked: Any) -> list[Tensor]:
    factors = tensors[1:] if len(tensors) == 4 else (tensors[0], tensors[1], tensors[3])
    return [x.new_empty(x.shape) for x, need in zip(factors, needed, strict=True) if need and x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, (wanted, ctx.chunk_tokens), ctx.asked = list(inputs[:6]), inputs[6:8], inputs[8:]
    options = Options.of_flat(*ctx.asked)
    made = output[1 + options.return_lse :]
    if _in_forward(options, tensors[0], wanted):
        ctx.save_for_backward(tensors[0].new_empty(0), *made)
    else:
        counted, statistics = made
        tensors[5] = counted if tensors[5] is None and counted.ndim == 0 else tensors[5]
        ctx.save_for_backward(*tensors, statistics)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    arrived = list(grads[: 1 + ctx.asked[-1]])
    found = iter(backward(arrived, list(ctx.saved_tensors), needed, ctx.chunk_tokens, *ctx.asked))
    dinput, dweight, dbias = (next(found) if need else None for need in needed)
    return dinput, dweight, None, dbias, *(None,) * (4 + len(ctx.asked))


forward.register_autograd(_gradients, setup_context=_keep)


def _in_forward(options: Options, input: Tensor, wanted: list[bool]) -> bool:
    return in_forward(options, input.dtype, _wanted(input, wanted))


def _wanted(input: Tensor, flags: list[bool]) -> Wanted:
    return tuple(input.dtype if flag else None for flag in flags)
