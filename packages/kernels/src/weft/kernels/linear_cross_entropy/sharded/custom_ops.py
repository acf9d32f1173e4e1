"""linear_cross_entropy as custom torch ops: one node in torch.compile's graph, with fake implementations for shapes.

On DTensors the custom ops unwrap the operands and run on the local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError
from weft.reshard import layout_of
from weft.reshard.extension import wrap

from ...cross_entropy.options import SCHEMA, Options
from ...cross_entropy.sharded.custom_ops import (
    SHARD_SCHEMA,
    VocabShard,
    compute_denominator,
    parse_shard_and_options,
    shard_of,
)
from ...cross_entropy.sharded.gather import VocabGather
from ...dispatch.sharded.compiled import TracedOperands, to_local
from .. import function
from ..function import in_forward
from ..gradients import Wanted
from .agreement import check_and_size, classes_of, compare_sizes
from .layout_rule import LINEAR_CROSS_ENTROPY

__all__ = ["apply_custom_op"]  # importing it registers the ops for DTensors
FACTORS = (0, 1, 3)  # input, linear_weight and linear_bias among the operands

TENSORS = "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? denominator"


def apply_custom_op(
    *tensors: Tensor | None,
    options: Options,
    wanted: Wanted,
    chunk_tokens: int | None,
    compute_dtype: torch.dtype | None,
    shard: VocabShard,
    disagreement: Tensor | None,
) -> tuple[Tensor, ...]:
    """The outputs of cross-entropy. Called by both public losses under torch.compile.

    tensors: in the order of TENSORS.
    wanted: None for each gradient that is not wanted. The dtypes are not used: each gradient has the dtype of its
        tensor, because torch 2.13's compiler ignores `grad_dtype`.
    options: inplace_backward is ignored, because the compiler decides on memory.
    disagreement: the scalar from `compare`, added to the loss: 0, or NaN if the ranks' sizes differ. None for
        `linear_cross_entropy`.
    """
    flags = [each is not None for each in wanted]
    outputs = forward(*tensors, disagreement, flags, chunk_tokens, compute_dtype, *shard, *options.flat())
    first = 1 + options.return_lse
    return *outputs[:first], *(each.detach() for each in outputs[first : options.num_outputs])


@library.custom_op(
    "weft::linear_cross_entropy_compare",
    mutates_args=(),
    schema=f"({TENSORS}, bool[] wanted, int? chunk_tokens, ScalarType? compute_dtype, bool sequence_parallel, "
    f"{SHARD_SCHEMA}, {SCHEMA}) -> Tensor",
)
def compare(*arguments: Any) -> Tensor:
    """Compare the ranks' sizes before the gathers of `vocab_parallel_linear_cross_entropy`, by `compare_sizes`.

    Returns the scalar of `compare_sizes`: 0, or NaN if the sizes differ.
    """
    *tensors, flags, chunk_tokens, compute_dtype, sequence_parallel = arguments[:10]
    shard, options = parse_shard_and_options(arguments[10:])
    gather, vocab_size = VocabGather.from_names(shard.groups), shard.vocab_size
    assert gather is not None and vocab_size is not None, "vocab_parallel_linear_cross_entropy gives both"
    (group,), classes = gather.groups, classes_of(tensors[1], shard.vocab_start, vocab_size)
    wanted = _wanted((tensors[0], tensors[1], tensors[3]), flags)
    _, disagreement = compare_sizes(
        lambda: (
            None,
            check_and_size(
                *tensors, options=options, classes=classes, wanted=wanted, chunk_tokens=chunk_tokens,
                compute_dtype=compute_dtype, rank=group.rank(), ranks=group.size(), sequence_parallel=sequence_parallel,
            ),
        ),
        group,
        classes,
        tensors[0].device,
    )  # fmt: skip
    return disagreement


@compare.register_fake
def _(input: Tensor, *arguments: Any) -> Tensor:
    return input.new_empty((), dtype=torch.float32)


@library.custom_op(
    "weft::linear_cross_entropy",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor? disagreement, bool[] wanted, int? chunk_tokens, ScalarType? compute_dtype, "
    f"{SHARD_SCHEMA}, {SCHEMA}) -> Tensor[]",
)
def forward(*arguments: Any) -> list[Tensor]:
    """The outputs, followed by the further tensors backward needs.

    If forward computes the gradients (`in_forward`): the gradients of input, linear_weight and linear_bias. Otherwise:
    the denominator, unless given, and the statistics. An empty tensor stands for a missing one.
    """
    *tensors, disagreement, flags, chunk_tokens, compute_dtype = arguments[:10]
    shard, options = parse_shard_and_options(arguments[10:])
    factors = (tensors[0], tensors[1], tensors[3])
    wanted = _wanted(factors, flags)
    (loss, *further), saved = function.forward(
        *tensors,
        options=options,
        wanted=wanted,
        compute_dtype=compute_dtype,
        chunk_tokens=chunk_tokens,
        **_options_of(shard),
    )
    if disagreement is not None:
        loss = loss + disagreement
    if in_forward(options, compute_dtype or tensors[0].dtype, wanted):
        # Cast to the wanted dtype: the dtype of the sums depends on the number of chunks, unknown to a trace.
        for_backward = [None if part is None else part.to(dtype) for part, dtype in zip(saved[1:], wanted, strict=True)]
    else:
        for_backward = [saved[5] if tensors[5] is None else None, saved[6]]  # the denominator, the statistics
    return [loss, *further, *(loss.new_empty(0) if each is None else each for each in for_backward)]


@forward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    input, linear_weight, target, linear_bias, weight, denominator, _, flags, _, compute_dtype = arguments[:10]
    shard, options = parse_shard_and_options(arguments[10:])
    dtype = compute_dtype or input.dtype
    lse = torch.empty(target.shape, dtype=torch.promote_types(dtype, torch.float32), device=input.device)
    empty = lse.new_empty(0)
    loss = torch.empty_like(lse) if options.reduction == "none" else lse.new_empty(())
    outputs = [loss, *([lse] * options.return_lse), *(torch.empty_like(loss) for _ in range(options.num_constants))]
    factors = (input, linear_weight, linear_bias)
    if in_forward(options, dtype, _wanted(factors, flags)):
        gradients = zip(factors, flags, strict=True)
        return [
            *outputs,
            *(x.new_empty(x.shape) if want and x is not None else empty.clone() for x, want in gradients),
        ]
    own_denominator = empty
    if options.reduction == "mean" and denominator is None:
        own_denominator = lse.new_empty((2,) if options.has_two_weights(weight) else ())
    return [*outputs, own_denominator, lse.new_empty(shard.shards, target.numel(), options.columns)]


@library.custom_op(
    "weft::linear_cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor?[] grads, Tensor?[] tensors, bool[] needed, int? chunk_tokens, ScalarType? compute_dtype, "
    f"{SHARD_SCHEMA}, {SCHEMA}) -> Tensor[]",
)
def backward(
    grads: list[Tensor | None],
    tensors: list[Tensor | None],
    needed: list[bool],
    chunk_tokens: int | None,
    compute_dtype: torch.dtype | None,
    *flat: Any,
) -> list[Tensor]:
    """The needed ones among the gradients of input, linear_weight and linear_bias.

    tensors: the saved tensors of `function.forward`. With gradients computed in forward 4: an empty tensor and the
        gradients of input, linear_weight and linear_bias. Otherwise 7: the operands, in the order of TENSORS, and the
        statistics.
    needed: whether each of the three gradients is needed.
    """
    shard, options = parse_shard_and_options(flat)
    needed_of_tensors = (needed[0], needed[1], False, needed[2], False, False)
    gradients = function.backward(
        tensors, grads, needed_of_tensors,
        options=options, wanted=_wanted(_factors(tensors), needed), compute_dtype=compute_dtype,
        chunk_tokens=chunk_tokens, **_options_of(shard),
    )  # fmt: skip
    return [each for each in gradients if each is not None]


@backward.register_fake
def _(grads: list[Tensor | None], tensors: list[Tensor | None], needed: list[bool], *flat: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip(_factors(tensors), needed, strict=True) if need and x is not None]


def _factors(saved: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Of the saved tensors, three with the shapes and dtypes of the gradients of input, linear_weight and linear_bias.

    saved: 4 or 7 tensors, see `backward`. The three are the gradients from forward, or the operands themselves.
    """
    return saved[1:] if len(saved) == 4 else (saved[0], saved[1], saved[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save for `_gradients`: the 4 or 7 tensors which `backward` takes, and the arguments of `forward`."""
    *tensors, _, flags, ctx.chunk_tokens, ctx.compute_dtype = inputs[:10]
    ctx.flat = inputs[10:]
    _, options = parse_shard_and_options(ctx.flat)
    dtype = ctx.compute_dtype or tensors[0].dtype
    ctx.num_outputs = options.num_outputs
    for_backward = output[ctx.num_outputs :]
    if in_forward(options, dtype, _wanted((tensors[0], tensors[1], tensors[3]), flags)):
        ctx.save_for_backward(tensors[0].new_empty(0, dtype=dtype), *for_backward)
    else:
        own_denominator, statistics = for_backward
        tensors[5] = own_denominator if tensors[5] is None and own_denominator.numel() else tensors[5]
        ctx.save_for_backward(*tensors, statistics)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The autograd formula of `forward`: the gradients of all arguments, by `backward`."""
    output_grads = grads[: ctx.num_outputs]
    if all(grad is None for grad in output_grads):  # all upstream gradients are zero
        return (None,) * (10 + len(ctx.flat))
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    gradients = iter(
        backward(output_grads, list(ctx.saved_tensors), needed, ctx.chunk_tokens, ctx.compute_dtype, *ctx.flat)
    )
    dinput, dweight, dbias = (next(gradients) if need else None for need in needed)
    return dinput, dweight, None, dbias, *(None,) * (6 + len(ctx.flat))


forward.register_autograd(_gradients, setup_context=_save)


def _options_of(shard: VocabShard) -> dict[str, Any]:
    """The options of `function.forward` and `function.backward` for this rank's shard of the vocabulary."""
    gather = VocabGather.from_names(shard.groups)
    return {
        "vocab_start": shard.vocab_start,
        "vocab_size": shard.vocab_size,
        "shards": shard.shards,
        "gather": gather,
    }


def _wanted(factors: Sequence[Tensor | None], flags: Sequence[bool]) -> Wanted:
    """The dtypes of the wanted gradients: the dtype of each factor whose flag is set."""
    return tuple(x.dtype if flag and x is not None else None for x, flag in zip(factors, flags, strict=True))


def _forward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> list[Tensor]:
    """`forward` called with DTensors: run it on the local tensors, and wrap the results as DTensors."""
    *tensors, denominator, disagreement, flags, chunk_tokens, compute_dtype = args[:10]
    _, options = parse_shard_and_options(args[10:])
    operands = TracedOperands.unwrap(
        LINEAR_CROSS_ENTROPY, (*tensors, denominator), options=options, compute_dtype=compute_dtype
    )
    input, _, target, _, weight, _ = operands.locals
    assert input is not None, "the input is required"
    dtype = compute_dtype or input.dtype
    divisor = compute_denominator(denominator, target, weight, dtype, operands, options)
    flat = (*shard_of(operands), *options.flat())
    results = forward(*operands.locals[:5], divisor, disagreement, flags, chunk_tokens, compute_dtype, *flat)
    outputs = operands.wrap_outputs(results[: options.num_outputs])
    for_backward = results[options.num_outputs :]
    if in_forward(options, dtype, tuple(dtype if flag else None for flag in flags)):
        # the layout of a scalar's gradient: replicated
        layouts = operands.plan.sharding.gradient_layouts(Layout(operands.plan.sharding.output.mesh))
        for_backward = [
            operands.wrap_gradient(i, part, layouts[i]) if want else part
            for i, part, want in zip(FACTORS, for_backward, flags, strict=True)
        ]
    elif denominator is None and divisor is not None:
        for_backward[0] = divisor
    return [*outputs, *for_backward]


def _backward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> list[Tensor]:
    """`backward` called with DTensors: run it on the local tensors, and wrap the gradients as DTensors."""
    grads, tensors, needed, chunk_tokens, compute_dtype, *flat = args
    _, options = parse_shard_and_options(flat)
    local_grads = [to_local(grad) for grad in grads]
    if len(tensors) == 4:  # the gradients computed in forward, and an empty tensor
        for layout in (layout_of(grad) for grad in grads if isinstance(grad, DTensor)):
            if layout != (replicated := Layout(layout.mesh)):
                raise LayoutError(
                    f"the gradient of the loss has layout ({layout}); reshard it to ({replicated})", (replicated,)
                )
        saved = [to_local(each) for each in tensors]
        gradients = backward(local_grads, saved, needed, chunk_tokens, compute_dtype, *VocabShard(), *options.flat())
        wanted_tensors = [each for each, need in zip(tensors[1:], needed, strict=True) if need]
        return [
            wrap(part, layout_of(like), like.shape) if isinstance(like, DTensor) else part
            for part, like in zip(gradients, wanted_tensors, strict=True)
        ]
    *saved_operands, statistics = tensors
    operands = TracedOperands.unwrap(LINEAR_CROSS_ENTROPY, saved_operands, options=options, compute_dtype=compute_dtype)
    flat = [*shard_of(operands), *options.flat()]
    gradients = backward(local_grads, [*operands.locals, statistics], needed, chunk_tokens, compute_dtype, *flat)
    layouts, wanted = operands.gradient_layouts(*grads), [i for i, need in zip(FACTORS, needed, strict=True) if need]
    return [operands.wrap_gradient(i, part, layouts[i]) for i, part in zip(wanted, gradients, strict=True)]


library.register_torch_dispatch(forward, DTensor, _forward)
library.register_torch_dispatch(backward, DTensor, _backward)
