"""Attention as two custom torch ops, forward and backward, each one node of a traced graph.

The ops take local tensors. On DTensors, `sharded.apply` unwraps the operands before the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from ..random.part import Part
from .compute import compute, compute_backward
from .options import AttentionOptions, Operands

OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? documents, Tensor? dropout_key, Tensor? sinks"
# The fields of `AttentionOptions` in order; `order`, `queries` and `part` flattened to lists of numbers.
OPTIONS = (
    "int head_dim, bool causal, float? scale, SymInt? window, float? softcap, float dropout, int number, str? name, "
    "SymInt? first, SymInt[]? order, SymInt[]? queries, SymInt[]? part"
)


def forward(operands: Operands, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The output like query, and the logsumexp [B, heads, T]."""
    return _forward(*operands, *_flat(options))  # type: ignore[no-any-return]


def backward(
    grad: Tensor, operands: Operands, output: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks."""
    dquery, dkey, dvalue, dsinks = _backward(grad, output, lse, *operands, *_flat(options))
    return dquery, dkey, dvalue, None if operands[-1] is None else dsinks


@library.custom_op("weft::attention", mutates_args=(), schema=f"({OPERANDS}, {OPTIONS}) -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, options = _parsed(arguments)
    output, lse, _ = compute(operands, options)
    return output.contiguous(), lse.contiguous()


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, head_dim = arguments[0], arguments[6]
    sizes = (math.prod(query.shape[:-2]), query.shape[-1] // head_dim, query.shape[-2])
    lse = query.new_empty(sizes, dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(query.shape), lse


@library.custom_op(
    "weft::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor lse, {OPERANDS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(grad: Tensor, output: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands, options = _parsed(arguments)
    *gradients, dsinks = compute_backward(grad, operands, output, lse, None, options)
    dquery, dkey, dvalue = (each.contiguous() for each in gradients)
    return dquery, dkey, dvalue, lse.new_empty(0) if dsinks is None else dsinks


@_backward.register_fake
def _(grad: Tensor, output: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, *_, sinks = arguments[:6]
    dquery, dkey, dvalue = (each.new_empty(each.shape) for each in (query, key, value))
    return dquery, dkey, dvalue, lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _flat(options: AttentionOptions) -> tuple[Any, ...]:
    """The options as arguments of a custom op."""
    *fields, order, queries, part = options._replace(number=options.number - 2**64 * (options.number >= 2**63))
    runs = (None if each is None else [place for run in each for place in run] for each in (order, queries))
    return *fields, *runs, None if part is None else [part.offset, *part.sizes, *part.strides]


def _parsed(arguments: Sequence[Any]) -> tuple[Operands, AttentionOptions]:
    """The operands and options of a custom op's arguments: the reverse of `_flat`."""
    operands: Any = tuple(arguments[:6])
    *fields, order, queries, part = arguments[6:]
    order, queries = (
        None if each is None else tuple(zip(each[::2], each[1::2], strict=True)) for each in (order, queries)
    )
    if part is not None:
        dims = len(part) // 2
        part = Part(part[0], tuple(part[1 : 1 + dims]), tuple(part[1 + dims :]))
    options = AttentionOptions._make((*fields, order, queries, part))
    return operands, options._replace(number=options.number % 2**64)
