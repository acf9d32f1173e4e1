"""cross_entropy's custom ops on DTensors: unwrap the operands and run the same ops on local tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, library
from torch.distributed.tensor import DTensor

from ...sharded.traced import Placed, sum_over, to_local
from ..function import mean_denominator
from ..options import Options
from . import custom_ops
from .custom_ops import Place, Results, compiled, with_lse
from .layouts import CROSS_ENTROPY, local_denominator

__all__ = [
    "compiled",
    "divided_by",
    "place_of",
]  # `compiled` is imported from here, where its ops are registered for DTensors


def _forward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Results:
    logits, target, weight, denominator, *asked = args
    _, options = with_lse(asked)
    placed = Placed.of(CROSS_ENTROPY, (logits, target, weight, denominator), options=options)
    divisor = divided_by(denominator, placed.locals[1], placed.locals[2], logits.dtype, placed, options)
    rest = (*place_of(placed), *options.flat())
    loss, lse, z_loss, accuracy, counted, statistics = custom_ops.forward(*placed.locals[:3], divisor, *rest)
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
    dlogits = custom_ops.backward(*arrived, *placed.locals, statistics, *rest)
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


library.register_torch_dispatch(custom_ops.forward, DTensor, _forward)
library.register_torch_dispatch(custom_ops.backward, DTensor, _backward)
